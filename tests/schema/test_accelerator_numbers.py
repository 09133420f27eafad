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
from pdcluster_schema.stock_rules import precision_of
from tests.schema.object_cases import at, minimal

CPX = {"memoryBytes": 128 * 10**9, "bandwidthBytes": 2 * 10**12, "bf16Flops": 4 * 10**15}


def spec_of(definitions: dict[str, Any]) -> PDClusterSpec:
    document = minimal()
    at("spec.accelerators", definitions)(document)
    at("spec.roles.decode.pools.0.gpu", next(iter(definitions)))(document)
    return parse(document).spec


@pytest.mark.parametrize("name", sorted({*accelerators()} - {NO_ACCELERATOR}))
def test_each_gpu_of_the_table_has_numbers_that_fit_together(name: str) -> None:
    """GB per GPU, TB/s, and a lower precision is about twice as fast, but on Gaudi 3."""
    gpu = accelerators()[name]

    assert 16e9 <= (gpu.memory_bytes or 0) <= 300e9
    assert 0.3e12 <= (gpu.bandwidth_bytes or 0) <= 10e12
    rates = [rate for rate in (gpu.bf16_flops, gpu.fp8_flops, gpu.fp4_flops) if rate]
    assert gpu.bf16_flops is not None
    factor = 1 if name == "GAUDI3" else 1.99
    assert all(factor * one <= other for one, other in pairwise(rates))


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
    own = spec_of({"CPX": {"resource": "nvidia.com/gpu", **CPX}})
    hardware = own.hardware("CPX")

    assert (hardware.memory_bytes, hardware.fp8_flops) == (128 * 10**9, None)
    assert own.length_thresholds() == {"CPX": 2000}


def test_a_definition_over_a_known_type_takes_its_place_whole() -> None:
    hardware = spec_of({"H100": {"resource": "my/gpu", "bf16Flops": 10**15}}).hardware("H100")

    assert (hardware.bf16_flops, hardware.bandwidth_bytes) == (10**15, None)


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


def test_our_engine_computes_in_bf16() -> None:
    assert precision_of(EngineSpec()) == "bf16"
