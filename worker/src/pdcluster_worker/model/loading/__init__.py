"""A model folder: whether we run it, what it is, and its weights."""
