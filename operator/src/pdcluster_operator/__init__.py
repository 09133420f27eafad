"""The operator process: watches PDClusters, reconciles one at a time, and scrapes their workers."""

__version__ = "0.1.0"
