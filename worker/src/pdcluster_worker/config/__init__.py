"""The worker's two files, parsed and checked: the engine file, fixed for a revision, and the policy
file, which may change.
"""
