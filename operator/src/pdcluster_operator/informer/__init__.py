"""Reads of the API server: lists of every kind, watches of children, and their cache."""
