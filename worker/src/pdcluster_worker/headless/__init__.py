"""Connection between a headless engine and its head, a worker on another host."""
