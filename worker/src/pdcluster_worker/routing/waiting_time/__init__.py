"""The time until requests and request groups are complete, and the order in which groups are
served.
"""
