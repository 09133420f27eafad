"""The worked examples of the window's arithmetic, and what config.json says of it."""

import doctest

import pytest

from pdcluster_worker.engine import window as engine_window
from pdcluster_worker.model import window as model_window
from pdcluster_worker.model.window import window_of_every_layer


@pytest.mark.parametrize("module", [engine_window, model_window])
def test_worked_examples_hold(module):
    found = doctest.testmod(module)
    assert found.failed == 0
    assert found.attempted > 1


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"sliding_window": None}, None),
        ({"sliding_window": 100}, None),  # as long as the context
        ({"sliding_window": 99}, 99),
        ({"sliding_window": 8, "use_sliding_window": False}, None),
        ({"sliding_window": 8, "use_sliding_window": True}, 8),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, 8),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, None),
    ],
)
def test_window_is_one_that_every_layer_has(config, window):
    assert window_of_every_layer(config, 100) == window
