"""Preview of applying a file: its effects by the planner itself, on what runs or on another file.

Pure.
"""
