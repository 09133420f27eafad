"""The PDCluster object: its types and its rules, with messages that name field, reason and fix.

Everything above works on these frozen models only; nothing here does I/O
except reading a file that it is given.
"""
