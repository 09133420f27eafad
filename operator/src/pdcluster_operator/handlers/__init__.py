"""Kubernetes events become cache entries and keys of the work queue; probes are answered."""
