"""The line between a headless engine and the head, the worker on another host that gives it
requests.
"""
