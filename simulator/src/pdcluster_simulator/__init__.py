"""Simulates a PDCluster: discrete events over the policies of its workers and its operator."""

__version__ = "0.1.0"
