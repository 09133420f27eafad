"""Reconcile one PDCluster at a time: observe, plan, render, converge, write the status; with its
queue.
"""
