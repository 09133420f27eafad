"""Products with weights in 8 bits: the bits of those with the same weights dequantized."""

import math

import pytest
import torch

from pdcluster_worker.model.ops.cpu import CpuOperations
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.ops.quantized_weight import (
    QuantizedWeight,
    columns_of,
    joined,
    padded,
    rows_of,
)
from pdcluster_worker.model.ops.reference import Reference
from tests.make_quantized_model import quantized

SHAPE = AttentionShape(1, 1, 16, 1.0)
CLOSE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}
CODES = pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])


@pytest.fixture
def cpu(kernels, dtype):
    return CpuOperations(torch.zeros(1, 1, 1, 2, 16, 16, dtype=dtype), SHAPE, kernels)


@pytest.fixture
def reference(dtype):
    return Reference(torch.zeros(1, 1, 1, 2, 16, 16, dtype=dtype), SHAPE)


def weight_of(columns: int, depth: int, group: int, codes: torch.dtype) -> QuantizedWeight:
    random = torch.Generator().manual_seed(columns + depth)
    dense = torch.randn(columns, depth, generator=random) / math.sqrt(depth)
    dense[:, 0] = 3.0  # an outlier, so that small weights become the least codes and zeros
    return quantized(dense, codes, (1, group))


@CODES
@pytest.mark.parametrize("wide", [False, True], ids=["", "wide"])
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "group"),
    [
        (1, 960, 576, 576),
        (3, 40, 256, 128),
        (33, 70, 96, 32),
        (47, 64, 100, 100),  # rows of no whole step
        (300, 130, 2432, 128),  # more rows and more steps than stay in a core's caches
        (2, 33, 576, 128),  # a last group that is half as wide
        (5, 3, 96, 24),  # groups of no whole step: packed as dense ones
    ],
)
def test_a_product_has_the_bits_of_dequantized_weights(
    rows, columns, depth, group, codes, wide, dtype, cpu, reference
):
    weight, x = weight_of(columns, depth, group, codes), torch.randn(rows, depth).to(dtype)
    bias = torch.randn(columns).to(dtype)
    packed = cpu.pack(weight, bias, wide=wide)
    found = cpu.linear(x, packed)
    close = CLOSE[torch.float32 if wide else dtype]
    expected = reference.linear(x, reference.pack(weight, bias, wide=wide))
    torch.testing.assert_close(found, expected, atol=close, rtol=close)
    dense = cpu.linear(x, cpu.pack(weight.dense(dtype), bias, wide=wide))
    if cpu.name == "cpu amx" and dtype == torch.bfloat16:  # codes are multiplied by vectors there
        torch.testing.assert_close(found, dense, atol=close, rtol=close)
    else:
        assert torch.equal(found, dense)


@CODES
def test_a_rows_product_has_the_same_bits_alone_and_among_others(
    codes, dtype, cpu, each_thread_count
):
    packed = cpu.pack(weight_of(200, 640, 128, codes))
    x = torch.randn(300, 640).to(dtype)
    expected = cpu.linear(x, packed)
    for _ in each_thread_count():
        for rows in (1, 2, 7, 13, 33, 150, 299):
            assert torch.equal(cpu.linear(x[-rows:].contiguous(), packed), expected[-rows:]), rows


@CODES
def test_all_codes_come_back_as_they_are(codes, dtype, cpu):
    """By a product with each unit row: a code times a scale of 1."""
    bits = torch.arange(-128, 128).to(torch.int8)
    bits = bits[bits & 127 != 127] if codes != torch.int8 else bits  # NaN of FP8
    weight = QuantizedWeight(bits.view(1, -1), torch.ones(1, 1), len(bits), codes)
    found = cpu.linear(torch.eye(len(bits)).to(dtype), cpu.pack(weight))
    assert torch.equal(found.float().flatten(), bits.view(codes).float())


@CODES
def test_packed_weights_take_a_byte_and_a_scale(codes, dtype, cpu):
    packed = cpu.pack(weight_of(64, 256, 128, codes))
    assert packed.tiles.numel() == 64 * 256
    assert packed.quantized.scales.numel() == 64 * 2


@CODES
@pytest.mark.parametrize(
    ("group", "share"), [(128, (192, 384)), (384, (192, 384)), (64, (64, 128))]
)
def test_parts_of_a_weight_are_those_of_the_dense_one(codes, group, share):
    weight = weight_of(10, 384, group, codes)
    dense = weight.dense(torch.float32)
    cut = slice(*share)
    assert torch.equal(columns_of(weight, cut).dense(torch.float32), dense[:, cut])
    assert torch.equal(rows_of(weight, slice(3, 7)).dense(torch.float32), dense[3:7])
    both = joined([weight, padded(weight, 2)], torch.float32)
    assert isinstance(both, QuantizedWeight)
    expected = torch.cat([dense, dense, torch.zeros(2, 384)])
    assert torch.equal(both.dense(torch.float32), expected)
    mixed = joined([weight, dense], torch.float32)
    assert torch.equal(mixed, torch.cat([dense, dense]))
