"""Entry of requests: the choice of the decode workers that run them, and of others when one fails
or leaves.
"""
