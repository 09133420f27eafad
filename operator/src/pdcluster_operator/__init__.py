"""The operator process: watches PDClusters, reconciles one at a time, and scrapes their workers."""
