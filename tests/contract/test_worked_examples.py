"""Worked examples in docstrings of all distributions are what the code returns."""

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes  # some import torch

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for path in ROOT.glob("*/src") if path.parent.name in ("schema", "operator", "worker")
]
MODULES = sorted(
    ".".join(path.relative_to(source).with_suffix("").parts)
    for source in SOURCES
    for path in source.rglob("*.py")
    if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("name", MODULES)
def test_worked_examples_of_a_module_hold(name: str) -> None:
    failed, attempted = doctest.testmod(import_module(name))

    assert failed == 0
    assert attempted > 0
