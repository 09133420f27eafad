"""The PDCluster worker: a server process and engine processes of one role."""

__version__ = "0.1.0"
