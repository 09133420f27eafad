"""Reconcile one PDCluster at a time: look, plan, act, report; with its queue."""
