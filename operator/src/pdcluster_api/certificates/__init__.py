"""Certificates of a cluster: made, read, rotated; no I/O."""
