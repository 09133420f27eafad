"""Every Triton kernel compiles ahead to machine code of Hopper (sm_90) and Blackwell (sm_100),
without a GPU.
"""

import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdcluster_worker.model.ops import triton_kernels
from pdcluster_worker.model.ops.cuda import BLOCK
from pdcluster_worker.model.ops.operations import AttentionShape
from pdcluster_worker.model.ops.paged_attention import AttentionSizes
from pdcluster_worker.model.ops.triton_kernels import attention, rows, sampling

SHARED_MEMORY = 227 << 10
"""Bytes that one program may have, on both."""

SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=64, scaling=0.1)
NARROW = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
POINTERS = {
    "slots": "*i64",
    "logits": "*fp32",
    "settings": "*fp64",
    "picks": "*i64",
    "workspaces": "*fp32",
} | dict.fromkeys(("firsts", "lengths", "contexts", "table_rows", "tables"), "*i32")
WIDE = ("weight", "weights", "partial", "cosine", "sine", "query_weight", "key_weight")
FLOATS = ("epsilon", "query_epsilon", "key_epsilon", "scale")
STRIDES = ("layer_offset", "head_stride", "block_stride")
TENSORS = ("added", "hidden", "out", "gate_up", "qkv")


def constants(sizes: AttentionSizes, window: int = 0) -> dict[str, dict[str, Any]]:
    heads = {
        "num_heads": SHAPE.num_heads,
        "num_kv_heads": SHAPE.num_kv_heads,
        "head_dim": SHAPE.head_dim,
    }
    tile = {
        "dim_block": sizes.dim_block,
        "key_block": sizes.key_block,
        "block_size": 16,
        "window": window,
    }
    splits = {
        "split_keys": sizes.split_keys,
        "max_splits": sizes.max_splits,
        "doublings": sizes.doublings,
    }
    return {
        "add_rms_norm": {"width": 4096, "block": 4096, "has_added": True, "rounds_first": True},
        "gate_mul": {"block": 1024, "is_silu": False},
        "rope_store": heads
        | {
            "half": 32,
            "half_block": 32,
            "tail_block": 1,
            "block_size": 16,
            "rotates": True,
            "has_norms": True,
            "rounds_first": True,
        },
        "decode": heads | tile | splits | {"rows": sizes.decode_rows},
        "chunk": heads | tile | {"rows": sizes.chunk_rows},
        "merge": splits
        | {
            "num_heads": 32,
            "head_dim": 64,
            "dim_block": sizes.dim_block,
            "split_block": 32,
            "window": window,
        },
        "pick": {"vocab_size": 151936, "block": BLOCK},
    }


KERNELS = {
    name: kernel
    for module in (attention, rows, sampling)
    for name, kernel in vars(module).items()
    if isinstance(kernel, triton.runtime.JITFunction) and not name.startswith("_")
}


def kind(name: str, dtype: torch.dtype, cache: str) -> str:
    if name in TENSORS:
        return NARROW[dtype]
    if name == "cache":
        return cache or NARROW[dtype]
    if name in WIDE:
        return "*fp32"
    return POINTERS.get(name, "fp32" if name in FLOATS else "i32")


def test_every_kernel_is_listed() -> None:
    assert sorted(KERNELS) == sorted(constants(AttentionSizes.of(SHAPE, torch.float32, 512)))


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in KERNELS
        for dtype in (torch.bfloat16, torch.float32)
        if (name, dtype) != ("pick", torch.bfloat16)  # logits are float32
    ],
    ids=str,
)
def test_kernel_compiles(name: str, dtype: torch.dtype, arch: int) -> None:
    made = compile_kernel(name, dtype, arch, window=0)
    if (name, dtype, arch) == ("chunk", torch.bfloat16, 90):
        assert "wgmma" in made.asm["ptx"]  # the tensor cores of Hopper
    if name == "pick":
        assert "fma" not in made.asm["ptx"]  # each product and sum is rounded once
        assert ".ftz" not in made.asm["ptx"]


@pytest.mark.parametrize("cache", ["*i8", "*u8"])
@pytest.mark.parametrize("name", ["decode", "chunk", "rope_store"])
def test_kernel_over_quantized_keys_compiles(name: str, cache: str) -> None:
    made = compile_kernel(name, torch.bfloat16, 90, window=0, cache=cache)
    if cache == "*u8" and name != "rope_store":
        assert "e4m3x2" in made.asm["ptx"]  # by the GPU's own instruction


@pytest.mark.parametrize("name", ["decode", "merge", "chunk"])
def test_kernel_with_a_window_compiles(name: str) -> None:
    compile_kernel(name, torch.bfloat16, 90, window=4096)


def all_functions() -> list[Any]:
    """Every Triton function of the worker."""
    modules = [
        importlib.import_module(f"{triton_kernels.__name__}.{found.name}")
        for found in pkgutil.iter_modules(triton_kernels.__path__)
    ]
    return [
        each
        for module in modules
        for each in vars(module).values()
        if isinstance(each, triton.runtime.JITFunction)
    ]


def test_no_function_has_keyword_only_parameters() -> None:
    """Triton 3.6 cannot compile them."""
    functions = all_functions()
    assert {each.__name__ for each in functions} >= {*KERNELS, "_attend"}
    kinds = {
        f"{each.__name__}({name})": one.kind
        for each in functions
        for name, one in inspect.signature(each.fn).parameters.items()
    }
    assert [
        name for name, of in kinds.items() if of is not inspect.Parameter.POSITIONAL_OR_KEYWORD
    ] == []


def compile_kernel(
    name: str, dtype: torch.dtype, arch: int, window: int, *, cache: str = ""
) -> Any:
    sizes = AttentionSizes.of(SHAPE, dtype, 32768)
    kernel, fixed = KERNELS[name], constants(sizes, window)[name]
    signature = {
        parameter: "constexpr" if parameter in fixed else kind(parameter, dtype, cache)
        for parameter in inspect.signature(kernel.fn).parameters
    }
    whole = [
        index
        for index, (parameter, of) in enumerate(signature.items())
        if of[0] == "*" or parameter in STRIDES
    ]
    aligned = {(index,): [["tt.divisibility", 16]] for index in whole}  # as in a launch
    fuses = name in vars(attention)  # as they are launched
    options = {"num_stages": 2, "enable_fp_fusion": fuses, "num_warps": sizes.warps}

    made = triton.compile(
        ASTSource(kernel, signature, fixed, aligned),
        target=GPUTarget("cuda", arch, 32),
        options=options,
    )

    assert f".target sm_{arch}" in made.asm["ptx"]
    assert len(made.asm["cubin"]) > 0
    assert made.metadata.shared <= SHARED_MEMORY
    return made


@pytest.mark.parametrize(
    "kernel", [attention.decode, attention.merge, attention.chunk, rows.rope_store]
)
def test_where_the_arrays_of_a_step_lie_makes_no_other_kernel(kernel: Any) -> None:
    of_plan = [param for param in kernel.params if param.name in POINTERS]
    assert of_plan
    assert all(param.do_not_specialize_on_alignment for param in of_plan)


def test_a_number_of_splits_makes_no_other_kernel() -> None:
    (param,) = (param for param in attention.merge.params if param.name == "num_splits")
    assert param.do_not_specialize
