"""Types, rules and names that operator and worker share: the PDCluster object, etcd keys, and
small helpers of both.  Imports neither, and does no I/O but to read files that it is given.
"""
