"""Sizes of pools: what is asked for, and the facts that the autoscaler starts from."""
