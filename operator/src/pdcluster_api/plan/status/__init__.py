"""The status of a PDCluster: conditions, numbers and events."""
