"""The operator process: watches and reconciles PDClusters, and scrapes their workers."""

__version__ = "0.1.0"
