"""Pure planning: from a PDCluster (and what is observed) to what should run.  No I/O, no clock."""
