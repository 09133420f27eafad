"""Time until requests and request groups are complete, and the order of groups (QLM)."""
