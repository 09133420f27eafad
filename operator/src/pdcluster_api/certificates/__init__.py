"""Certificates of a cluster, its authority and the workers' shared one: made, read, rotated; no
I/O.
"""
