"""Layers by one call of the kernels: the bits of the operations one after another, on any number of
threads.
"""

import ctypes
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from pdcluster_worker.model.ops.cpu import CpuOperations
from pdcluster_worker.model.ops.kernel_arguments import PackedStack
from pdcluster_worker.model.ops.kernel_object import Kernels, find_kernels
from pdcluster_worker.model.ops.operations import Layers, Operations
from pdcluster_worker.model.ops.reference import Reference
from tests.worker.model.ops.layer_steps import HEADS, STEPS, make_layers, rows_of
from tests.worker.model.ops.paged_steps import stored_step

CLOSE = {torch.bfloat16: 6e-2, torch.float32: 1e-4}
TIED = {torch.bfloat16: 2, torch.float32: 0}  # rows whose experts may be others: near ties


@pytest.mark.parametrize("name", list(STEPS))
def test_layers_by_one_call_have_the_bits_of_layer_by_layer(
    name, dtype, make_cpu, each_thread_count
):
    step = stored_step(HEADS, STEPS[name], dtype)
    alone = replace(step, cache=step.cache.clone())
    ops, fine = make_cpu(step), make_cpu(alone)
    layers = make_layers(ops, step, dtype)
    assert PackedStack.takes(layers)
    expected = rows_of(step, dtype)
    Operations.run_layers(fine, expected, step.plan, layers, step.rotation)
    for _ in each_thread_count():
        hidden = rows_of(step, dtype)
        ops.run_layers(hidden, step.plan, layers, step.rotation)
        assert torch.equal(hidden, expected)
        assert torch.equal(step.cache.nan_to_num(), alone.cache.nan_to_num())


@pytest.fixture
def bound(kernels):
    """The number of threads that the kernels keep to, which a test may change at any time."""
    number = ctypes.c_int32(3)
    kernels.library.bound(ctypes.c_void_p(ctypes.addressof(number)))
    yield number
    kernels.library.bound(None)


@pytest.mark.parametrize("name", ["decodes", "decodes and chunks"])
def test_layers_have_the_same_bits_while_threads_leave_and_come(
    name, dtype, make_cpu, each_thread_count, bound
):
    shallow = stored_step(HEADS, STEPS[name], dtype)
    step = replace(shallow, cache=shallow.cache.repeat(1, 1, 6, 1, 1, 1))
    ops = make_cpu(step)
    layers = Layers(make_layers(ops, step, dtype).each * 6, "silu")  # more moments to leave at
    bound.value = 1
    expected = rows_of(step, dtype)
    ops.run_layers(expected, step.plan, layers, step.rotation)

    ended = threading.Event()
    changes = threading.Thread(target=lambda: change(bound, ended))
    changes.start()
    try:
        for _ in each_thread_count():
            for _ in range(4):
                hidden = rows_of(step, dtype)
                ops.run_layers(hidden, step.plan, layers, step.rotation)
                assert torch.equal(hidden, expected)
    finally:
        ended.set()
        changes.join()


def change(number: ctypes.c_int32, ended: threading.Event) -> None:
    """Set it to other values, 0 among them, until the end."""
    random = Random(3)
    while not ended.wait(random.random() / 2000):
        number.value = random.randrange(5)


def test_a_step_begins_with_no_more_threads_than_it_may(dtype, make_cpu, each_thread_count, bound):
    """Whatever torch's number is: libgomp would start those that are missing."""
    bound.value = 1
    step = stored_step(HEADS, STEPS["decodes"], dtype)
    ops = make_cpu(step)
    layers = make_layers(ops, step, dtype)
    before = num_threads()
    for _ in each_thread_count():
        ops.run_layers(rows_of(step, dtype), step.plan, layers, step.rotation)
        ops.attend(torch.zeros(len(step.plan.slots), HEADS.width, dtype=dtype), step.plan, 0)
    assert num_threads() <= before


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_layers_by_one_call_compute_what_the_reference_does(dtype, make_cpu):
    step = stored_step(HEADS, STEPS["decodes and chunks"], dtype)
    theirs = replace(step, cache=step.cache.clone())
    ops, reference = make_cpu(step), Reference(theirs.cache, HEADS.shape)
    hidden, expected = rows_of(step, dtype), rows_of(step, dtype)
    ops.run_layers(hidden, step.plan, make_layers(ops, step, dtype), step.rotation)
    layers = make_layers(reference, step, dtype)
    reference.run_layers(expected, step.plan, layers, step.rotation)
    rows = step.plan.num_tokens
    close = hidden[:rows].isclose(expected[:rows], atol=CLOSE[dtype], rtol=CLOSE[dtype])
    assert int((~close.all(1)).sum()) <= TIED[dtype]


@pytest.mark.parametrize(
    "environment",
    [
        {"OMP_NUM_THREADS": "2,1"},  # of a region within it is what OpenMP says is the most there
        {"OMP_WAIT_POLICY": "PASSIVE"},
        {"GOMP_SPINCOUNT": "20000"},
    ],
)
def test_layers_by_one_call_have_the_same_bits_however_threads_wait(environment):
    kernels = find_kernels()
    if not isinstance(kernels, Kernels):
        pytest.skip(kernels.reason)
    chosen = f"bits and chunks and {kernels.level}-bf16"
    arguments = ["-q", "-p", "no:cacheprovider", __file__, "-k", chosen]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout[-2000:]
    assert "2 passed" in ended.stdout


def test_layers_whose_rows_need_padding_run_one_by_one(dtype, make_cpu):
    step = stored_step(HEADS, STEPS["decodes"], dtype)
    ops = make_cpu(step)
    layers = make_layers(ops, step, dtype, depth=40, inner=24)
    assert PackedStack.takes(layers) is False
    hidden, expected = rows_of(step, dtype, 40), rows_of(step, dtype, 40)
    Operations.run_layers(ops, expected, step.plan, layers, step.rotation)
    ops.run_layers(hidden, step.plan, layers, step.rotation)
    assert torch.equal(hidden, expected)


def test_operations_take_other_layers_after_the_first(dtype, make_cpu):
    """A proof and a draft's own weights may come between."""
    step = stored_step(HEADS, STEPS["one decode"], dtype)
    ops: CpuOperations = make_cpu(step)
    one, other = make_layers(ops, step, dtype), make_layers(ops, step, dtype, inner=64)
    found = []
    for layers in (one, other, one):
        hidden = rows_of(step, dtype)
        ops.run_layers(hidden, step.plan, layers, step.rotation)
        found.append(hidden)
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
