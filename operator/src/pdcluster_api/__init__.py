"""The ground that the operator and pdctl share: the planner, manifests, and
the ways to read the API server and etcd.

It imports neither of the two programs.
"""
