"""Errors as answers, in the shape of the API whose path was asked for."""
