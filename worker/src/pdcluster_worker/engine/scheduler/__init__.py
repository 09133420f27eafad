"""Schedulers: choose the tokens of each request in the next step."""
