"""Constraints on answers, compiled by llguidance and followed token by token in the engine."""
