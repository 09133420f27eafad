"""The way down without a lost request: how far a StatefulSet may shrink, and what a node drain must
leave.
"""
