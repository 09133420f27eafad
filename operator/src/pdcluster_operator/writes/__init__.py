"""Writes to the API server: children where they differ, the status, and Events."""
