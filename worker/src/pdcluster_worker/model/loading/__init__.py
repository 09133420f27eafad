"""A model folder: checks that we run it, its facts, and its weights."""
