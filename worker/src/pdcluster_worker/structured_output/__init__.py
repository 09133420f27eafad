"""Constraints on answers: compiled by a process beside the engine, and followed token by token
inside it.
"""
