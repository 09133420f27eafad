"""Reads of the API server: lists of every kind, and the cache that the watches keep."""
