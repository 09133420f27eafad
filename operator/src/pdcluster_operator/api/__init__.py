"""The PDCluster object: its types, its rules and the errors that a user reads.

Everything above (`plan`, `manifests`, `local`, `cli`) works on these frozen
models only; nothing here does I/O except reading a file that it is given.
"""
