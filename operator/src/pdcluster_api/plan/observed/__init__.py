"""Inputs of the planner: plain values of what is there, and of what the status says was there."""
