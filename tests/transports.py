"""The transports of KV blocks that this machine can test."""

import importlib.util

import pytest

_MODULES = {"nixl": ("nixl_cu13", "nixl_cu12"), "ucx": ("ucxx",)}


def need_transport(name: str) -> str:
    """The name, for a test that goes over it; the test is skipped where it is not installed."""
    modules = _MODULES.get(name, ())
    if modules and not any(importlib.util.find_spec(module) for module in modules):
        pytest.skip(f"needs pdcluster-worker[{name}], which is not installed: run make setup")
    return name
