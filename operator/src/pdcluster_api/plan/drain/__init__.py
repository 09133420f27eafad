"""Sizes to which StatefulSets may shrink, and budgets of node drains."""
