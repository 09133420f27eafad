"""Sampling on the device that holds the logits: the samples of the host, from a few bytes a row, in
a few waits, within the memory that is reckoned for it.

The device is simulated, and so is the launch of the kernel (its own test:
`tests/worker/model/ops/test_cuda_sampling.py`).
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pdcluster_worker.engine.ports import Sample
from pdcluster_worker.engine.request import Batch, Scheduled
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.kv_cache import KVCache
from pdcluster_worker.model.loading.loader import ModelInfo
from pdcluster_worker.model.ops import cuda
from pdcluster_worker.model.ops.cuda import CudaOperations
from pdcluster_worker.model.runner import Runner
from pdcluster_worker.model.sampling import picking
from pdcluster_worker.model.sampling.picking import pick_tokens
from pdcluster_worker.model.sampling.rows import Rows
from pdcluster_worker.model.sampling.sampler import PLAIN_TENSORS, Sampler, rank_tokens
from pdcluster_worker.model.step_plan import StepLimits
from pdcluster_worker.structured_output.masks import Masks
from tests.worker.model.other_device import OtherDevice
from tests.worker.model.sampling.sampling_cases import make_request, random_logits, rows_for

VOCAB = 3000
KINDS = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0},
    {"temperature": 0.7, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "top_p": 0.9, "logprobs": 0},
    {"temperature": 1.3, "top_k": 5, "logit_bias": {7: 4.0, 11: -100.0}},
    {"temperature": 0.8, "top_k": 400, "top_p": 0.95, "min_p": 0.001},
    {"temperature": 2.5, "top_p": 0.999},
    {"temperature": 1.0, "min_tokens": 9, "eos_token_ids": [2, 9], "presence_penalty": 0.5},
]


class Launch:
    """The kernel's launch, by plain operations in the device's own memory."""

    def __getitem__(self, grid):
        def launch(
            logits, settings, picks, workspaces, *, vocab_size, block, num_warps, enable_fp_fusion
        ):
            assert not enable_fp_fusion  # a fused product would have other bits
            assert vocab_size == logits.inner.shape[1]
            assert block % (32 * num_warps) == 0
            assert workspaces.inner.shape == (*grid, block)
            inverse_temperature, top_k, top_p, min_p, u = settings.inner.numpy().T
            rows = Rows(
                inverse_temperature.astype(np.float32),
                top_k.astype(np.int64),
                top_p,
                min_p.astype(np.float32),
                u,
            )
            found = pick_tokens(logits.inner, rows)
            picks.inner[:] = torch.from_numpy(np.stack((found.token_ids, found.status), axis=1))

        return launch


@pytest.fixture
def awaited(monkeypatch):
    """Every wait for a forward pass; tokens are chosen by the table of operations of cuda."""
    found = []
    stream = SimpleNamespace(synchronize=lambda: found.append("awaited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(cuda.sampling, "pick", Launch())
    return found


def batch_of(num_rows):
    """Requests of all kinds, logits with rows that fail, and masks of some rows."""
    logits = random_logits(num_rows, num_rows, VOCAB).bfloat16().float()
    logits[1, 5], logits[3, 2999], logits[4] = float("nan"), float("inf"), -float("inf")
    requests = [
        make_request([5, 6, 6, 9], 2, f"r{n}", seed=n, **KINDS[n % len(KINDS)])
        for n in range(num_rows)
    ]
    rows = np.array([0, 2, num_rows - 1])
    allowed = np.random.default_rng(1).random((3, VOCAB)) < 0.1
    return logits, requests, Masks(rows, allowed, {})


def test_samples_are_those_of_the_host_and_no_row_of_logits_comes_to_it(awaited):
    logits, requests, masks = batch_of(16)
    needed = [Sampler(VOCAB).sample(logits, requests, each) for each in (masks, None)]

    with OtherDevice() as device:
        there = device.place(logits)
        sampler = Sampler(VOCAB, CudaOperations.row_ops)
        found = [sampler.sample(there, requests, each) for each in (masks, None)]

        after = there.inner.nan_to_num(7.0)
    assert torch.equal(after, logits.nan_to_num(7.0))
    assert list(map(str, found)) == list(map(str, needed))
    assert sum(isinstance(each, Sample) for each in found[1]) == 13
    assert max(device.copied) <= 16 * 8 * 4  # a few numbers a row


def test_the_number_of_waits_does_not_grow_with_the_rows(awaited):
    waits = []
    for num_rows in (16, 64):
        logits, requests, masks = batch_of(num_rows)
        for row in (1, 3, 4):  # an error's text asks for its row
            logits[row] = 0.5
        with OtherDevice() as device:
            there = device.place(logits)
            Sampler(VOCAB, CudaOperations.row_ops).sample(there, requests, masks)
        waits.append(device.num_waits)

    assert waits[0] == waits[1]


def test_temporaries_of_a_slab_fit_the_memory_that_is_reckoned():
    """Also where all tokens are equals, which are then all put in order."""
    for logits in (random_logits(1, 24, VOCAB, 0.1), torch.zeros(24, VOCAB)):
        with OtherDevice() as device:
            rank_tokens(device.place(logits), np.arange(24), 20, 8 * VOCAB)
        assert device.most_bytes <= logits.nbytes + picking.CHUNK_BYTES * 8 * VOCAB


@pytest.mark.parametrize("chunk", [1, 5 * VOCAB, 1 << 24])
def test_the_size_of_a_slab_changes_nothing(chunk, monkeypatch):
    monkeypatch.setattr(picking, "FIRST_GUESS", 4)
    logits = random_logits(3, 16, VOCAB)
    rows = rows_for(VOCAB, *[{**kind, "seed": n} for n, kind in enumerate(KINDS * 2)])

    found = pick_tokens(logits, rows, chunk)

    assert found.token_ids.tolist() == pick_tokens(logits, rows).token_ids.tolist()


class StubForward:
    """Random logits by position, on a device or in host memory."""

    code = "stub"

    def __init__(self, row_ops, place):
        self.operations = SimpleNamespace(row_ops=row_ops, pads_rows=False)
        self._place = place

    def close(self):
        pass

    def logits(self, plan):
        rows = [random_logits(int(plan.positions[at]), 1, VOCAB) for at in plan.sample_at.tolist()]
        return self._place(torch.cat(rows))


def run_steps(row_ops, place):
    """Outcomes of a prompt that is scored beside one that is not, then of both decodes."""
    geometry = KVGeometry(num_kv_heads=1, head_dim=8, num_layers=1, block_size=16, dtype="float32")
    info = ModelInfo(geometry, "", "float32", 64, VOCAB, (None,))
    limits = StepLimits(max_tokens=64, max_sequences=4, longest=64, block_size=16)
    runner = Runner(info, StubForward(row_ops, place), KVCache(geometry, 8), limits)
    requests = [
        make_request(range(9), name="scored", temperature=1.0, top_p=0.9, prompt_logprobs=2),
        make_request(range(20), name="plain", temperature=1.0),
    ]
    outcomes = []
    for index, request in enumerate(requests):
        request.block_table = [2 * index, 2 * index + 1]
    for counts in ((9, 20), (1, 1)):
        items = [Scheduled.of(*pair) for pair in zip(requests, counts, strict=True)]
        outcomes.append(runner.execute(Batch(tuple(items))))
        for request, outcome in zip(requests, outcomes[-1], strict=True):
            request.num_computed_tokens = request.num_tokens
            request.tokens.append(outcome.token_id)
    runner.close()
    return outcomes


def test_runner_leaves_logits_where_they_are_and_waits_for_each_pass(awaited):
    needed = run_steps(PLAIN_TENSORS, lambda logits: logits)

    with OtherDevice() as device:
        found = run_steps(CudaOperations.row_ops, device.place)

    assert found == needed
    assert len(found[0][0].prompt_logprobs) == 8
    assert max(device.copied) <= 9 * 8 * 4
    assert len(awaited) == 3  # one part of a prompt, and both steps


def test_a_tensor_of_the_host_among_those_of_the_device_is_found():
    with OtherDevice() as device:
        there = device.place(torch.ones(2, 3))
        with pytest.raises(RuntimeError, match="on the host"):
            there + torch.ones(2, 3)
        with pytest.raises(RuntimeError, match="on the host"):
            there[torch.tensor([1])]
        assert (there.cpu() * 2).tolist() == [[2.0] * 3] * 2
