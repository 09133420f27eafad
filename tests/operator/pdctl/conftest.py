"""Fixtures of pdctl's tests."""

from tests.operator.pdctl.run_of_up import start

__all__ = ["start"]
