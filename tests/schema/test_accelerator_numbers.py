"""Numbers of accelerators: the table's, an object's own, and the precision in which they count."""

from itertools import pairwise
from typing import Any

import pytest

from pdcluster_schema.accelerators import NO_ACCELERATOR, NUMBERS, accelerators
from pdcluster_schema.engine import EngineSpec
from pdcluster_schema.load import parse
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.revision import revision_of
from pdcluster_schema.sections import AcceleratorSpec
from pdcluster_schema.stock_rules import precision_of, weight_only_pools
from tests.schema.object_cases import at, minimal

CPX = {"memoryBytes": 128 * 10**9, "bandwidthBytes": 2 * 10**12, "bf16Flops": 4 * 10**15}


def spec_of(definitions: dict[str, Any]) -> PDClusterSpec:
    document = minimal()
    at("spec.accelerators", definitions)(document)
    at("spec.roles.decode.pools.0.gpu", next(iter(definitions)))(document)
    return parse(document).spec


# Published without its rates of BF16 and FP8
CPX_OF_TABLE = "RUBIN-CPX"


@pytest.mark.parametrize("name", sorted({*accelerators()} - {NO_ACCELERATOR, CPX_OF_TABLE}))
def test_each_gpu_of_the_table_has_numbers_that_fit_together(name: str) -> None:
    """GB per GPU, TB/s, and a lower precision is about twice as fast, but on Gaudi 3."""
    gpu = accelerators()[name]

    assert 16e9 <= (gpu.memory_bytes or 0) <= 300e9
    assert 0.3e12 <= (gpu.bandwidth_bytes or 0) <= 10e12
    rates = [rate for rate in (gpu.bf16_flops, gpu.fp8_flops, gpu.fp4_flops) if rate]
    assert gpu.bf16_flops is not None
    factor = 1 if name == "GAUDI3" else 1.99
    assert all(factor * one <= other for one, other in pairwise(rates))


@pytest.mark.parametrize("name", sorted({*accelerators()} - {NO_ACCELERATOR}))
def test_links_are_slower_than_memory_and_the_network_slower_than_the_links(name: str) -> None:
    gpu = accelerators()[name]
    speeds = [speed for speed in (gpu.network_bytes, gpu.link_bytes, gpu.bandwidth_bytes) if speed]

    assert gpu.source
    assert all(4 * slower <= faster for slower, faster in pairwise(speeds))


def test_rubin_cpx_has_what_is_published_and_no_links() -> None:
    cpx = accelerators()[CPX_OF_TABLE]

    assert (cpx.memory_bytes, cpx.fp4_flops) == (128 * 10**9, 20 * 10**15)
    assert (cpx.bf16_flops, cpx.link_bytes, cpx.break_even_tokens) == (None, None, None)


def test_b300_is_b200_with_more_memory_and_faster_fp4() -> None:
    b200, b300 = (accelerators()[name] for name in ("B200", "B300"))

    assert (b300.memory_bytes or 0) == 1.5 * (b200.memory_bytes or 0)
    assert (b300.fp4_flops or 0) == 1.5 * (b200.fp4_flops or 0)
    assert (b300.bandwidth_bytes, b300.fp8_flops) == (b200.bandwidth_bytes, b200.fp8_flops)


def test_an_own_type_takes_the_numbers_of_the_table() -> None:
    assert set(NUMBERS) == {
        field.alias
        for name, field in AcceleratorSpec.model_fields.items()
        if name not in ("resource", "node_labels")
    }
    own = spec_of({"CPX": {"resource": "nvidia.com/gpu", **CPX, "linkBytes": 64 * 10**9}})
    hardware = own.hardware("CPX")

    assert (hardware.memory_bytes, hardware.fp8_flops) == (128 * 10**9, None)
    assert (hardware.link_bytes, hardware.network_bytes) == (64 * 10**9, None)
    assert own.length_thresholds() == {"CPX": 2000}


@pytest.mark.parametrize(
    ("own", "place"),
    [
        ({"resource": "my/gpu", "bf16Flops": 10**15}, ("my/gpu", {})),
        ({"nodeLabels": {"a": "b"}, "bf16Flops": 10**15}, (None, {"a": "b"})),
        ({"pricePerHour": 2.5, "bf16Flops": 10**15}, None),
    ],
)
def test_a_definition_over_a_known_type_changes_what_it_names(
    own: dict[str, Any], place: tuple[str | None, dict[str, str]] | None
) -> None:
    """Resource and node labels are one: with either of them both are its own."""
    hardware, table = spec_of({"H100": own}).hardware("H100"), accelerators()["H100"]

    assert (hardware.bf16_flops, hardware.bandwidth_bytes) == (10**15, table.bandwidth_bytes)
    assert (hardware.resource, hardware.node_labels) == (
        place or (table.resource, table.node_labels)
    )


def test_a_price_is_of_a_type_that_the_object_gives_one() -> None:
    spec = spec_of({"H100": {"pricePerHour": 2.5}, "X1": {}})

    assert [spec.price_per_hour(gpu) for gpu in ("H100", "X1", "B200")] == [2.5, None, None]


def test_numbers_are_no_part_of_a_revision() -> None:
    assert revision_of(spec_of({"CPX": CPX})) == revision_of(spec_of({"CPX": {}}))


@pytest.mark.parametrize(
    ("args", "precision"),
    [
        ([], "bf16"),
        (["--quantization", "fp8"], "fp8"),
        (["--quantization=fp8_per_block"], "fp8"),
        (["-q", "modelopt"], "fp8"),
        (["--enforce-eager", "--quantization", "modelopt_fp4"], "fp4"),
        (["--quantization", "awq"], "bf16"),  # weights alone
        (["--quantization", "compressed-tensors"], "bf16"),  # as the checkpoint says
        (["--quantization", "fp8", "--quantization", "awq"], "bf16"),  # the last one counts
        (["--kv-cache-dtype", "fp8"], "bf16"),
        (["--quantization"], "bf16"),
        (["--quantization", "fp8\n"], "fp8"),  # of a YAML block
    ],
)
def test_vllm_computes_in_what_its_quantization_says(args: list[str], precision: str) -> None:
    engine = EngineSpec.model_construct(type="vllm", args=tuple(args))

    assert precision_of(engine) == precision


@pytest.mark.parametrize(
    ("gpu", "quantization", "found"),
    [
        ("A100-80GB", "fp8", ["roles.mixed.pools[0].gpu"]),
        ("H100", "fp8", []),
        ("H100", "modelopt_fp4", ["roles.mixed.pools[0].gpu"]),
        ("RUBIN-CPX", "fp8", []),  # not published
        ("cpu", "fp8", []),
    ],
)
def test_pools_without_units_for_the_precision_are_named(
    gpu: str, quantization: str, found: list[str]
) -> None:
    document = minimal()
    roles = {"mixed": {"pools": [{"name": "m", "gpu": gpu, "replicas": 1}]}}
    engine = {"type": "vllm", "image": "v", "args": ["--quantization", quantization]}
    document["spec"] |= {"engine": engine, "roles": roles}

    assert [place for place, _ in weight_only_pools(parse(document).spec)] == found


def test_our_engine_computes_in_bf16() -> None:
    assert precision_of(EngineSpec()) == "bf16"
