"""Writes of children to the API server, by server-side apply where they differ."""
