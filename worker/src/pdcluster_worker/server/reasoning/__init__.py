"""Reasoning that a model writes before its answer, separated from it by tags."""
