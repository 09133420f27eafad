"""Reads the workers' `/metrics` and keeps a short window of numbers for each pool."""
