"""Steps of the roofline by hand: products, the KV that streams read, and tokens that meet."""

import pytest

from pdcluster_schema.accelerators import accelerators
from pdctl.sizing.objective import Objective
from pdctl.sizing.profile import EngineProfile, RankLayout
from pdctl.sizing.roofline import COMPUTE_SHARE, READ_SHARE, roofline_profile
from pdctl.sizing.shape import shape_of
from tests.operator.pdctl.planned_models import LLAMA

H100 = accelerators()["H100"]
SHAPE = shape_of(LLAMA, "m")
COMPUTED = COMPUTE_SHARE * (H100.bf16_flops or 0)
READ = READ_SHARE * (H100.bandwidth_bytes or 0)
OF_PAIR = (
    32 * 4 * 4096
)  # layers, products of two numbers for key and value, and heads by their size


def profile_of(input_tokens: int, **changed: object) -> EngineProfile:
    goal = Objective(input_tokens, 200, ttft_seconds=1.0, itl_seconds=0.05)
    shape = shape_of(LLAMA | changed, "m")
    found = roofline_profile("H100", H100, RankLayout(1), shape, goal)
    assert found is not None
    return found


def test_a_token_of_a_prompt_meets_all_before_it():
    of_token = 2 * SHAPE.active_weights / COMPUTED
    for tokens in (1000, 30_000):
        pairs = tokens**2 / 2
        seconds = tokens * of_token + pairs * OF_PAIR / COMPUTED
        assert profile_of(tokens).prefill[1] == pytest.approx(seconds)
    assert profile_of(1000).prefill[4] == pytest.approx(4 * profile_of(1000).prefill[1])


def test_a_token_of_a_windowed_layer_meets_its_window():
    windowed = profile_of(10_000, sliding_window=1000, layer_types=["sliding_attention"] * 32)
    fewer = 10_000**2 / 2 - 1000 * (10_000 - 500)
    less = profile_of(10_000).prefill[1] - windowed.prefill[1]
    assert less == pytest.approx(fewer * OF_PAIR / COMPUTED)


def test_heads_of_a_latent_have_their_own_widths():
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}
    assert shape_of(LLAMA | latent | {"v_head_dim": 128}, "m").pair_operations == 2 * 32 * 320


def test_kv_reads_add_to_the_products_of_a_chunk():
    found, context = profile_of(3000), 2 * 2 * 32 * 8 * 128 * 3100
    pairs = 3000 / 2
    few, many = found.mixed[8192, 1], found.mixed[8192, 16]
    assert many - few == pytest.approx(15 * (context / READ - pairs * OF_PAIR / COMPUTED))
    assert found.decode[16] - found.decode[1] == pytest.approx(15 * context / READ)
