"""The PDCluster worker: a server process and an engine process that serve one role of
a PDCluster.
"""

__version__ = "0.1.0"
