"""Reconcile one PDCluster: look, plan, act, report."""
