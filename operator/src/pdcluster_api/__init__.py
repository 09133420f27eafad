"""The ground that the operator and pdctl share: the PDCluster object, the planner, manifests, and
the ways to read the API server and etcd.

Neither of the two programs is known here.
"""
