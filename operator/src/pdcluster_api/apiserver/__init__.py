"""The API server as both programs use it: requests, their errors, the kinds, and bodies read into
the planner's input.
"""
