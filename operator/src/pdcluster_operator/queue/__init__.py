"""Choose which PDCluster is reconciled next, and when: the queue, its runner, and the resync."""
