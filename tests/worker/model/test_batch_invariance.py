"""The logits of a request have the same bits whatever else is computed, however its prompt is cut,
on any number of threads.

In bfloat16, where rounding in another order turns tokens.  The reference operations do not promise
this.
"""

import random

import pytest
import torch

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.ops.kernel_object import LEVELS, Kernels, cpu_flags, load_kernels

NUM_OUTPUT = 10
PROMPT = [random.Random(3).randrange(3, 512) for _ in range(90)]


def levels():
    """Levels of kernels that were built and that this CPU runs."""
    return [level for level in LEVELS if isinstance(load_kernels(level, cpu_flags()), Kernels)]


@pytest.fixture(
    params=levels()
    or [pytest.param("none", marks=pytest.mark.skip(reason="no kernels were built here"))]
)
def make(request, tiny_folder, make_driver, monkeypatch):
    monkeypatch.setenv("PDCLUSTER_KERNELS", request.param)
    return lambda kind="llama", **options: make_driver(
        tiny_folder(kind), dtype="bfloat16", batch_invariant=True, **options
    )


def answer(driver, chunk=10_000, company=0, cached=0):
    """Logits of each step that sampled for the request, as bits, and its tokens.

    company: other requests of its steps.  cached: tokens whose KV another request left.
    """
    found = []
    sample = driver.runner._sampler.sample

    def keep(logits, requests, *others):
        found.extend(
            logits[row].clone() for row, each in enumerate(requests) if each.request_id == "a"
        )
        return sample(logits, requests, *others)

    driver.runner._sampler.sample = keep
    request = driver.request("a", PROMPT)
    if cached:
        before = driver.request("before", PROMPT[:cached])
        driver.step((before, cached))
        request.block_table = (
            before.block_table[: cached // 16] + request.block_table[cached // 16 :]
        )
        request.num_computed_tokens = cached
    others = [
        driver.request(f"o{n}", PROMPT[n : n + 30 * n + 2], temperature=1.0, seed=n)
        for n in range(company)
    ]
    driver.finish([request, *others], NUM_OUTPUT, chunk)
    return torch.stack(found[:NUM_OUTPUT]).view(torch.int32), driver.output(request)


def assert_same(one, other):
    assert one[1][:NUM_OUTPUT] == other[1][:NUM_OUTPUT]
    assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma", "gpt-oss"])
def test_a_row_has_the_same_bits_on_every_path(kind, make):
    alone = answer(make(kind))
    assert_same(answer(make(kind), chunk=7), alone)
    assert_same(answer(make(kind), chunk=1), alone)  # a prompt token by token is all decodes
    assert_same(answer(make(kind), company=5, chunk=33), alone)
    assert_same(answer(make(kind), cached=80), alone)
    assert_same(answer(make(kind, threads=2), company=3), alone)


def test_the_last_token_of_a_cached_prompt_has_the_same_bits(make):
    """A prompt whose blocks are all cached but one token is a decode."""
    driver = make()
    whole = answer(make())
    request = driver.request("before", PROMPT)
    driver.step((request, 89))
    found = []
    sample = driver.runner._sampler.sample
    driver.runner._sampler.sample = lambda logits, *others: (
        found.append(logits.clone()) or sample(logits, *others)
    )
    driver.step((request, 1))
    assert torch.equal(found[0][0].view(torch.int32), whole[0][0])


def test_transformers_code_is_refused_because_it_does_not_promise_it(make):
    with pytest.raises(
        ModelError, match=r"engine\.batchInvariant needs our own decoder: model type olmo2"
    ):
        make("olmo2")
