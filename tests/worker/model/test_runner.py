"""The runner beyond greedy: sampling is the same on every path, and one bad request fails alone and
leaves nothing behind.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.config.worker import ModelConfig
from pdcluster_worker.engine.ports import Sample
from pdcluster_worker.errors import ModelError, RequestError
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.model.runner import Runner
from pdcluster_worker.model.runner_loader import open_runner
from pdcluster_worker.model.step_plan import StepLimits, row_sizes
from tests.equality import assert_same_tokens
from tests.worker.model.random_prompts import random_prompt

SAMPLED = {
    "temperature": 0.9,
    "seed": 11,
    "top_p": 0.95,
    "presence_penalty": 0.4,
    "repetition_penalty": 1.1,
    "logprobs": 2,
}


def test_seeded_sampling_is_the_same_in_chunks_in_company_and_after_preemption(
    tiny_folder, make_driver
):
    folder = tiny_folder("llama")
    alone = make_driver(folder)
    expected = alone.request("a", random_prompt(1, 50), **SAMPLED)
    alone.finish([expected], 20)

    driver = make_driver(folder, num_blocks=512)
    request = driver.request("a", random_prompt(1, 50), **SAMPLED)
    others = [
        driver.request(f"o{n}", random_prompt(50 + n, 30 * n + 1), temperature=1.0, seed=n)
        for n in range(3)
    ]
    driver.finish([request, *others], 9, chunk=16)
    driver.runner.forget("a")
    request.num_computed_tokens = 0
    request.block_table = []
    driver.allocate(request)
    driver.finish([request, *others], 20, chunk=33)
    assert driver.output(request) == alone.output(expected)


def test_a_moved_request_goes_on_with_the_same_tokens(tiny_folder, make_driver):
    """Its blocks are copied as bytes, and the new runner has never seen it."""
    folder = tiny_folder("qwen3")
    source, target = make_driver(folder), make_driver(folder)
    stays = source.request("a", random_prompt(1, 40), **SAMPLED)
    source.finish([stays], 5)
    moved = target.request("a", random_prompt(1, 40), **SAMPLED)
    moved.tokens[:] = stays.tokens
    moved.num_computed_tokens = stays.num_computed_tokens
    for local, there in zip(stays.block_table, moved.block_table, strict=True):
        target.cache.block(there)[:] = source.cache.block(local)
    source.finish([stays], 20)
    target.finish([moved], 20)
    assert target.output(moved) == source.output(stays)


def test_a_poisoned_request_fails_alone_and_its_blocks_do_no_harm(
    tiny_folder, make_driver, reference
):
    folder = tiny_folder("llama")
    driver = make_driver(folder)
    poison = 300
    with torch.no_grad():
        driver.runner.forward._weights.embedding[poison] = float("nan")
    good = driver.request("good", [t for t in random_prompt(1, 40) if t != poison])
    bad = driver.request("bad", [5, poison, 6])
    sample, error = driver.step((good, good.num_tokens), (bad, 3))
    assert isinstance(sample, Sample)
    assert isinstance(error, RequestError)
    assert error.code == "not_finite"
    assert "request bad" in str(error)
    heir = driver.request("heir", [9, 10, 11, 12, 13])
    heir.block_table[:] = bad.block_table
    driver.finish([good, heir], 6)
    for request in (good, heir):
        expected, gaps = reference(folder).greedy(request.tokens[: request.num_prompt_tokens], 6)
        assert_same_tokens(gaps, expected, driver.output(request))


def test_a_prompt_that_is_computed_again_has_the_same_log_probabilities(tiny_folder, make_driver):
    """As after a preemption in the middle of it; and they are said once, on the first token."""
    driver = make_driver(tiny_folder("llama"))
    request = driver.request("a", random_prompt(1, 50), prompt_logprobs=3)
    driver.step((request, 20))
    request.num_computed_tokens = 0
    (first,) = driver.step((request, 50))
    whole = driver.request("b", random_prompt(1, 50), prompt_logprobs=3)
    (again,) = driver.step((whole, 50))
    assert first.prompt_logprobs == again.prompt_logprobs
    assert len(first.prompt_logprobs) == 49
    assert all(
        one.top_logprobs[0] == (request.tokens[at], one.logprob)
        for at, one in enumerate(first.prompt_logprobs, 1)
        if one.rank == 1
    )
    (second,) = driver.step((request, 1))
    assert second.prompt_logprobs == ()
    driver.runner.forget("a")
    driver.runner.forget("b")
    assert not driver.runner._prompts._kept


def test_a_prompt_without_finite_logits_in_the_middle_fails_alone(tiny_folder, make_driver):
    """Its last row is good here, as where NaN comes of one position alone."""
    driver = make_driver(tiny_folder("llama"))
    good, bad = (
        driver.request("good", [5, 6, 7], prompt_logprobs=0),
        driver.request("bad", [5, 6, 7], prompt_logprobs=0),
    )
    logits = driver.runner.forward.logits
    driver.runner.forward.logits = lambda plan: logits(plan).index_fill_(
        0, torch.tensor([4]), float("nan")
    )
    sample, error = driver.step((good, 3), (bad, 3))
    assert [one.top_logprobs for one in sample.prompt_logprobs] == [[], []]
    assert isinstance(error, RequestError)
    assert error.code == "not_finite"
    assert "after 2 tokens" in str(error)


def test_a_step_that_fails_leaves_no_mask_under_way(tiny_folder, make_driver):
    """The next attempt feeds the same followers."""
    driver = make_driver(tiny_folder("llama"))
    request = driver.request("a", [5, 6, 7])
    with ThreadPoolExecutor(1) as pool:
        masks = pool.submit(time.sleep, 0.2)
        driver.runner._masks.begin = lambda places, chosen: masks
        driver.runner.forward.logits = lambda plan: 1 / 0
        with pytest.raises(ZeroDivisionError):
            driver.step((request, 3))

        assert masks.done()


def test_open_runner_describes_the_model_it_loaded(tiny_folder):
    folder = tiny_folder("mistral")
    engine = EngineConfig(block_size=8, max_model_len=100, kv_cache_memory=1 << 20, threads=1)
    runner, cache, info = open_runner(
        ModelConfig(name="tiny", path=str(folder), dtype="float32"), engine
    )
    assert info is runner.info
    assert (info.max_model_len, info.vocab_size, info.dtype) == (100, 512, "float32")
    assert info.geometry == KVGeometry(1, 16, 2, 8, "float32")
    assert cache.num_blocks == (1 << 20) // cache.block_bytes
    assert torch.get_num_threads() == 1
    assert runner.longest_warm_up_seconds > 0  # what a step may take, before any has been made


def test_open_runner_refuses_a_length_that_its_pool_does_not_hold(tiny_folder):
    model = ModelConfig(name="tiny", path=str(tiny_folder("llama")), dtype="float32")
    # KV heads, layers, keys and values, tokens, head size, float32
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4
    with pytest.raises(ModelError) as refused:
        open_runner(
            model, EngineConfig(max_model_len=100, kv_cache_memory=7 * block_bytes, threads=1)
        )
    assert str(refused.value) == (
        "engine.maxModelLen=100 does not fit: one request of 100 tokens takes 8 KV blocks "
        f"({8 * block_bytes} bytes), and there are 7 "
        f"({7 * block_bytes} bytes, room for 96 tokens): raise engine.kvCacheMemory to "
        f"{8 * block_bytes}, or lower maxModelLen to 96"
    )
    _, _, info = open_runner(model, EngineConfig(max_model_len=100, num_blocks=8, threads=1))
    assert (info.max_model_len, info.length_note) == (100, "")


def test_open_runner_lowers_the_models_own_length_to_what_its_pool_holds(tiny_folder, caplog):
    engine = EngineConfig(num_blocks=5, threads=1)
    runner, _, info = open_runner(
        ModelConfig(name="tiny", path=str(tiny_folder("llama")), dtype="float32"), engine
    )
    assert info.max_model_len == runner.info.max_model_len == 64
    assert "length of 2048 tokens is lowered to 64" in info.length_note
    assert "raise engine.numBlocks to 129" in info.length_note
    assert info.length_note in caplog.text


def test_a_step_whose_arrays_have_no_room_is_refused_with_its_sizes(make_driver, tiny_folder):
    runner = make_driver(tiny_folder("llama")).runner
    limits = StepLimits(max_tokens=10**13, max_sequences=4, longest=64, block_size=16)
    with pytest.raises(
        ModelError, match=r"Unable to allocate .*maxBatchedTokens is 10000000000000"
    ):
        Runner(runner.info, runner.forward, runner._cache, limits)


def test_open_runner_refuses_a_missing_folder():
    with pytest.raises(ModelError, match="does not exist"):
        open_runner(ModelConfig(name="x", path="/nowhere/at/all"), EngineConfig())


@pytest.mark.parametrize(("kernels", "sizes"), [("", []), ("off", row_sizes(2048))])
def test_rows_are_padded_and_their_sizes_warmed_only_where_code_is_made_for_each(
    kernels, sizes, tiny_folder, make_driver, monkeypatch
):
    monkeypatch.setenv("PDCLUSTER_KERNELS", kernels)
    driver = make_driver(tiny_folder("llama"))
    forward, met, rows = driver.runner.forward, [], []
    computed = forward.logits
    monkeypatch.setattr(forward, "warm_up", met.append)
    monkeypatch.setattr(
        forward, "logits", lambda plan: rows.append(len(plan.token_ids)) or computed(plan)
    )
    driver.runner.warm_up()
    assert met == sizes
    rows.clear()
    driver.finish([driver.request("a", random_prompt(1, 19))], 1)
    assert rows == [32 if sizes else 19]


def test_warm_up_leaves_answers_as_they_were(tiny_folder, make_driver, reference):
    """A batch of more tokens than the cache holds is cut; a cache of few blocks is enough."""
    folder = tiny_folder("llama")
    driver = make_driver(folder, num_blocks=8)
    driver.runner.warm_up()
    request = driver.request("r", [5, 6, 7])
    (sample,) = driver.step((request, 3))

    expected, _ = reference(folder).greedy([5, 6, 7], 1)
    assert [sample.token_id] == expected


def test_the_runner_says_where_the_time_of_its_last_step_went(tiny_folder, make_driver):
    driver = make_driver(tiny_folder("llama"))
    driver.finish([driver.request("a", random_prompt(1, 50))], 2)
    seconds = driver.runner.seconds
    assert min(seconds.inputs, seconds.forward, seconds.sample) > 0.0
