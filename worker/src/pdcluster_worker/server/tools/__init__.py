"""Calls of tools in a model's text: one module for each form that models write them in."""
