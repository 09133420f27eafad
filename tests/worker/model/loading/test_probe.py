"""The dry run refuses what configs do not state, and reads the KV geometry off the layers."""

from types import SimpleNamespace

import pytest
import torch

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.loading.transformers_loader import Probe, probe
from pdcluster_worker.model.ops.operations import AttentionShape

QUERY, KEY = torch.ones(1, 4, 2, 8), torch.ones(1, 2, 2, 8)


class OneLayer:
    """The smallest model: embeds (id, position), attends, returns the result as logits."""

    def __init__(
        self,
        mix: float = 0.0,
        heed_position: bool = True,
        num_layers: int = 1,
        zero_tokens: frozenset[int] = frozenset(),
        **options,
    ) -> None:
        self.zero_tokens = zero_tokens
        self.mix, self.heed_position, self.num_layers, self.options = (
            mix,
            heed_position,
            num_layers,
            options,
        )

    def __call__(self, input_ids, position_ids, attend, **_):
        place = position_ids if self.heed_position else torch.arange(2).unsqueeze(0)
        hidden = torch.sin(input_ids * 3.0 + place)[:, None, :, None].expand(1, 2, 2, 8)
        is_zero = torch.isin(input_ids, torch.tensor(sorted(self.zero_tokens), dtype=torch.int64))
        hidden = hidden * ~is_zero[:, None, :, None]
        hidden = hidden + self.mix * hidden.roll(1, dims=2)
        for layer in range(self.num_layers):
            out = attend(
                SimpleNamespace(layer_idx=layer),
                hidden.repeat(1, 2, 1, 1),
                hidden,
                hidden,
                **self.options,
            )
        return SimpleNamespace(logits=out.flatten(2))


def test_geometry_is_what_the_layers_use():
    shape = probe(OneLayer(num_layers=3, scaling=0.3), num_layers=3, max_model_len=10)
    assert (shape.attention, shape.dtype) == (AttentionShape(4, 2, 8, 0.3), torch.float32)


def test_model_that_mixes_unrelated_tokens_is_refused():
    with pytest.raises(ModelError, match="cannot be batched"):
        probe(OneLayer(mix=0.5), num_layers=1, max_model_len=10)


def test_model_that_ignores_positions_is_refused():
    with pytest.raises(ModelError, match="cannot be batched"):
        probe(OneLayer(heed_position=False), num_layers=1, max_model_len=10)


@pytest.mark.parametrize("zero_tokens", [{2}, {1, 2, 3}, {2, 5}, range(100)])
def test_a_token_without_an_embedding_proves_nothing(zero_tokens):
    zero = frozenset(zero_tokens)
    assert probe(OneLayer(zero_tokens=zero), num_layers=1, max_model_len=10).windows == (None,)
    if len(zero) < 100:
        with pytest.raises(ModelError, match="cannot be batched"):
            probe(OneLayer(zero_tokens=zero, heed_position=False), num_layers=1, max_model_len=10)


def test_layers_without_our_attention_are_refused():
    with pytest.raises(ModelError, match="1 of 2 layers use our attention"):
        probe(OneLayer(num_layers=1), num_layers=2, max_model_len=10)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 30.0}, "asks attention for softcap"),
        ({"s_aux": torch.zeros(4)}, "asks attention for s_aux"),
        ({"sliding_window": 0}, "sliding window of 0"),
        ({"attention_mask": torch.zeros(1)}, "its own attention mask"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_options_that_we_do_not_compute_are_refused(options, reason):
    with pytest.raises(ModelError, match=reason):
        Probe(max_model_len=10)(SimpleNamespace(layer_idx=0), QUERY, KEY, KEY, **options)


def test_options_that_change_nothing_are_accepted():
    options = {
        "softcap": None,
        "output_router_logits": False,
        "sliding_window": 10,
        "scaling": 0.1,
        "dropout": 0.0,
    }
    assert Probe(max_model_len=10)(
        SimpleNamespace(layer_idx=0), QUERY, KEY, KEY, **options
    ).shape == (1, 2, 4, 8)


@pytest.mark.parametrize(("window", "found"), [(9, 9), (10, None), (None, None)])
def test_windows_are_those_that_the_layers_ask_for_within_the_context(window, found):
    assert probe(
        OneLayer(num_layers=2, sliding_window=window), num_layers=2, max_model_len=10
    ).windows == (found, found)


@pytest.mark.parametrize("value", [torch.ones(1, 2, 2, 4), torch.ones(1, 1, 2, 8)])
def test_keys_and_values_of_different_shape_are_refused(value):
    with pytest.raises(ModelError, match="one head size"):
        Probe(max_model_len=10)(SimpleNamespace(layer_idx=0), QUERY, KEY, value)


def test_layers_of_different_geometry_are_refused():
    def model(attend, **_):
        for layer, heads in enumerate((2, 1)):
            part = torch.ones(1, heads, 2, 8)
            out = attend(SimpleNamespace(layer_idx=layer), QUERY, part, part)
        return SimpleNamespace(logits=out.flatten(2))

    with pytest.raises(ModelError, match="one KV geometry is needed"):
        probe(model, num_layers=2, max_model_len=10)


def test_an_error_of_the_models_code_names_it():
    def model(**_):
        raise RuntimeError("boom")

    with pytest.raises(ModelError, match="RuntimeError: boom"):
        probe(model, num_layers=1, max_model_len=10)
