"""Anthropic's Messages API: a thin layer over chat requests and the parts of their answers."""
