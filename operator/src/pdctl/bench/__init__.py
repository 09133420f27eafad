"""Measures a server as its clients see it: loads, times, figures, and the search for a
configuration.
"""
