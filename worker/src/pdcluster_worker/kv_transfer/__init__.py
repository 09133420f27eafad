"""Moves KV blocks between engines; implements engine.ports.Transport."""
