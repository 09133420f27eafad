"""Choose which PDCluster is reconciled next, and when: the queue, its runners, and the resync."""
