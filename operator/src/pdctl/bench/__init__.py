"""Benchmarks of a server as its clients see it, and the search for engine sizes."""
