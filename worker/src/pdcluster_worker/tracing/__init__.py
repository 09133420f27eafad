"""The way of each request through its workers: noted where it is decided, kept, traced."""
