"""The status of a PDCluster: conditions, numbers, and the events for changes between
two of them.
"""
