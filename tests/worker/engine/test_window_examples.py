"""The worked examples in the docstrings of the window's arithmetic, and which windows the engine
goes by.
"""

import doctest

import pytest

from pdcluster_worker.engine import block_table as engine_window
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.loading.loader import ModelInfo


def test_worked_examples_hold():
    found = doctest.testmod(engine_window)
    assert found.failed == 0
    assert found.attempted > 1


@pytest.mark.parametrize(
    ("windows", "window"),
    [
        ((None, None), None),
        ((8, None), None),  # one layer sees all: every block stays
        ((8, 8), 8),
        ((8, 64), 64),
    ],
)
def test_blocks_leave_the_longest_window_if_every_layer_has_one(windows, window):
    geometry = KVGeometry(num_kv_heads=1, head_dim=8, num_layers=2, block_size=4, dtype="float32")
    assert ModelInfo(geometry, "weights", "float32", 100, 9, windows).window == window
