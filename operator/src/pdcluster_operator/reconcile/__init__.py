"""Reconcile one PDCluster: observe, plan, apply, report."""
