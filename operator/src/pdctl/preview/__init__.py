"""Preview of applying a file by the planner itself, on a live cluster or another file; pure."""
