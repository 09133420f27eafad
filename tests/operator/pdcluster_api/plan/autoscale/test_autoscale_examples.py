"""The worked examples in the autoscaler's docstrings."""

import doctest
from types import ModuleType

import pytest

from pdcluster_api.plan.autoscale import explain, pools, signals, totals


@pytest.mark.parametrize(
    "module",
    [explain, pools, signals, totals],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_examples_hold(module: ModuleType):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0
