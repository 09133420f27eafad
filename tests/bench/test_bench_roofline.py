"""The roofline's arithmetic, on a model small enough to count by hand; and what the report reads of
a cluster.
"""

import pytest
import roofline
from cluster import Cluster
from roofline_figures import Machine, Shape, Step, reached

from pdctl.bench.measure import StartedCluster
from pdctl.bench.openai import OpenAIServer

# q 4x4, k and v 4x2 each, output 4x4: 48 a layer; MLP 3 x 4 x 6 = 72
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 6,
    "vocab_size": 10,
}
SHAPE = Shape.of(CONFIG)
PAGE = """\
# TYPE pdcluster_engine_step_seconds histogram
pdcluster_engine_step_seconds_bucket{kind="decode",le="+Inf"} 4
pdcluster_engine_step_seconds_count{kind="decode"} 4
pdcluster_engine_step_seconds_sum{kind="decode"} 0.5
pdcluster_engine_step_seconds_count{kind="mixed"} 9
pdcluster_engine_step_seconds_sum{kind="mixed"} 7
# TYPE pdcluster_engine_dtype_info gauge
pdcluster_engine_dtype_info{dtype="bfloat16",native="true"} 1
"""


def test_shape_counts_the_weights_of_its_matrices() -> None:
    assert SHAPE.layer_weights == 2 * (48 + 72)
    assert (SHAPE.head_weights, SHAPE.kv_elements) == (40, 2 * 2 * 1 * 2)
    assert Shape.of({**CONFIG, "head_dim": 4}).layer_weights == 2 * (96 + 72)


def test_decode_step_reads_all_weights_once_and_the_keys_of_each_sequence() -> None:
    step = Step.decode(num_sequences=3, context=5)

    assert step.bytes_moved(SHAPE, width=2) == 2 * (240 + 40 + 3 * 5 * 8)
    # products, then scores and weighted values: two operations for each of heads x head_dim x
    # attended
    assert step.flops(SHAPE) == 2 * (3 * 280) + 2 * 2 * (15 * 2 * 4)


def test_chunk_reads_its_context_once_and_no_head_where_it_samples_nothing() -> None:
    step = Step.chunk(num_tokens=4, before=10)

    assert step.attended == 11 + 12 + 13 + 14
    assert step.bytes_moved(SHAPE, width=4) == 4 * (240 + 14 * 8)


def test_step_is_held_to_the_tighter_limit() -> None:
    step = Step.decode(1, 0)  # 560 bytes, 560 operations
    slow_memory = reached(
        step, SHAPE, 2, seconds=1.0, machine=Machine(bandwidth=1120.0, peak=5600.0)
    )
    slow_products = reached(
        step, SHAPE, 2, seconds=1.0, machine=Machine(bandwidth=5600.0, peak=1120.0)
    )

    assert (slow_memory.bound, slow_products.bound) == ("memory", "compute")
    assert slow_memory.floor_seconds == slow_products.floor_seconds == 0.5
    assert (slow_memory.bandwidth_ratio, slow_memory.peak_ratio, slow_memory.floor_ratio) == (
        0.5,
        0.1,
        0.5,
    )


def test_model_of_another_form_is_refused() -> None:
    with pytest.raises(ValueError, match="has no intermediate_size; only llama-like"):
        Shape.of({name: value for name, value in CONFIG.items() if name != "intermediate_size"})


def test_phases_fill_one_step_with_their_prompts() -> None:
    one, sixteen, chunk = roofline.phases(budget=128)

    assert (one.step, sixteen.step) == (Step.decode(1, 8 + 64), Step.decode(16, 8 + 240))
    assert sixteen.num_requests * sixteen.lengths.input_len <= 128
    assert (chunk.lengths.input_len, chunk.lengths.output_len) == (4 * 128, 1)
    assert chunk.step == Step.chunk(128, 1.5 * 128)


async def test_steps_and_dtype_come_from_the_workers_own_metrics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def page(self: Cluster, url: str) -> str:
        return PAGE

    monkeypatch.setattr(Cluster, "_page", page)
    state = {"workers": [{"name": "a", "http": "x"}, {"name": "b", "http": "y"}], "model": "small"}
    cluster = Cluster(
        "mixed", StartedCluster("http://x", 1.0, state), OpenAIServer(None, "http://x", "small")
    )

    assert await cluster.steps("decode") == (8.0, 1.0)
    assert await cluster.dtype() == "bfloat16"


def test_report_shows_each_phase() -> None:
    one = reached(Step.decode(1, 0), SHAPE, 2, 1.0, Machine(1120.0, 5600.0))
    row = roofline.phase_table([("decode step of 1", one)]).splitlines()[2]

    assert [cell.strip() for cell in row.strip("|").split("|")][3:] == [
        "500.0",
        "memory",
        "1000.0",
        "50 %",
        "50 %",
        "10 %",
    ]
    assert "| 2       | 3.5       |" in roofline.machine_table({2: {"GB/s read": 3.5}})
