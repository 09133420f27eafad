"""Handshake of a worker with its peers."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import WorkerConfig
from pdcluster_worker.serving.worker_runtime import hello_of
from tests.worker.serving.doubles import FACTS


@pytest.mark.parametrize(("invariant", "operations"), [(True, "reference"), (False, "")])
def test_hello_has_the_operations_where_equal_bits_are_promised(invariant, operations):
    model = SimpleNamespace(name="chat")
    config: Any = SimpleNamespace(
        role="decode", revision="r1", model=model, engine=EngineConfig(batch_invariant=invariant)
    )

    hello = hello_of(cast(WorkerConfig, config), "w1", FACTS)

    assert (hello.engine_id, hello.operations, hello.revision, hello.weights) == (
        "w1",
        operations,
        "r1",
        "w",
    )
    assert (hello.model, hello.max_model_len, hello.vocab_size) == ("chat", 256, 100)
    assert hello.max_batched_tokens == 256
    assert not hello.restarts_grammar
    stock = replace(FACTS, restarts_grammar=True)
    assert hello_of(cast(WorkerConfig, config), "w1", stock).restarts_grammar


@pytest.mark.parametrize(
    ("changes", "hands_over"),
    [
        ({}, True),
        ({"prefix_caching": False}, False),
        ({"transport": ""}, False),
        ({"geometry": replace(FACTS.geometry, kind="vllm-0.32.0-nixl")}, False),
    ],
)
def test_hello_says_whether_it_hands_over_kv_of_its_cache(changes, hands_over):
    model = SimpleNamespace(name="chat")
    config: Any = SimpleNamespace(role="decode", revision="r1", model=model, engine=EngineConfig())

    assert hello_of(config, "w1", replace(FACTS, **changes)).hands_over_kv is hands_over
