"""One PDCluster at a time: observe, plan, render, converge, write the status; and the queue that says which one is next."""
