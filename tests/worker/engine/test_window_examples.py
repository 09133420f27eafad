"""The window's arithmetic by worked examples, and which windows the engine goes by."""

from dataclasses import replace

import pytest

from pdcluster_worker.engine.block_table import first_live_block, most_blocks, most_tokens
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.loading.loader import ModelInfo


def test_worked_examples_hold():
    settings = EngineSettings(4, 100, 8, 1, max_model_len=99, window=6)
    small = replace(settings, num_blocks=4)

    assert [first_live_block(n, settings) for n in (0, 8, 9, 12, 13)] == [0, 0, 1, 1, 2]
    assert [most_blocks(n, settings) for n in (8, 16, 1000)] == [2, 4, 4]
    assert most_tokens(small) is None
    assert most_tokens(replace(small, num_blocks=3)) == 12
    assert most_tokens(replace(small, window=None)) == 12


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
