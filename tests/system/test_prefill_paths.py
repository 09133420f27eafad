"""Place where a prompt is computed, its transfers, and that the client can see and
force the path.
"""

import openai
import pytest

from tests.system.client import MODEL, Json, answer_of, body
from tests.system.tokens import chat_tokens, text_of, tokens_in
from tests.system.worker_process import WorkerProcess

BLOCK = 16
THRESHOLD = 256  # routing.offload.prefillLengthThreshold, by default


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 64, 100])
def test_forced_remote_moves_what_the_prompt_implies(pair, prompts, reference, num_tokens):
    prompt, num_blocks = prompts(num_tokens), -(-num_tokens // BLOCK)
    before, sent_before = pair.decode.metrics(), pair.prefill.metrics()

    answer = pair.decode.client.complete(prompt, "remote")

    assert answer.prefill == "remote"
    reference.check(prompt, answer.tokens)
    pair.decode.wait_growth(before, "remote_prefill_total", 1, outcome="ok")
    pair.decode.wait_growth(
        before,
        "kv_transfer_bytes_total",
        num_blocks * pair.decode.block_bytes,
        direction="received",
    )
    pair.prefill.wait_growth(
        sent_before,
        "kv_transfer_bytes_total",
        num_blocks * pair.decode.block_bytes,
        direction="sent",
    )
    pair.prefill.wait_growth(sent_before, "engine_step_tokens_sum", num_tokens, kind="prefill")
    for phase in ("queue", "prefill", "first_token", "transfer"):
        assert (
            pair.prefill.growth(sent_before, "remote_prefill_phase_seconds_count", phase=phase) == 1
        )


def test_forced_local_moves_nothing(pair, prompts, reference):
    prompt = prompts(THRESHOLD + 44)
    before = pair.decode.metrics()

    answer = pair.decode.client.complete(prompt, "local")

    assert answer.prefill == "local"
    reference.check(prompt, answer.tokens)
    pair.decode.wait_growth(before, "generation_tokens_total", len(answer.tokens))
    assert pair.decode.growth(before, "remote_prefill_total", outcome="ok") == 0
    assert pair.decode.growth(before, "kv_transfer_bytes_total", direction="received") == 0


@pytest.mark.parametrize(
    ("num_tokens", "place"),
    [(THRESHOLD - 1, "local"), (THRESHOLD, "remote"), (THRESHOLD + 1, "remote")],
)
def test_auto_offloads_from_the_threshold_on(pair, prompts, reference, num_tokens, place):
    prompt = prompts(num_tokens)
    before = pair.decode.metrics()

    answer = pair.decode.client.complete(prompt, "auto")

    assert answer.prefill == place
    reference.check(prompt, answer.tokens)
    pair.decode.wait_growth(before, "long_prompts_total", int(place == "remote"), prefill="remote")
    assert pair.decode.growth(before, "long_prompts_total", prefill="local") == 0


def test_both_records_say_that_long_prompts_are_offloaded(pair, prompts):
    pair.decode.client.complete(prompts(THRESHOLD), "auto")

    def stated(worker: WorkerProcess) -> Json:
        found: Json = pair.cluster.records()[worker.name]["disaggregation"]
        return found

    pair.decode.wait_for(lambda: stated(pair.decode)["remote_ratio"], lambda: stated(pair.decode))
    pair.prefill.wait_for(
        lambda: stated(pair.prefill)["bytes_per_second"], lambda: stated(pair.prefill)
    )
    assert (stated(pair.decode)["transport"], stated(pair.prefill)["transport"]) == ("tcp", "tcp")
    assert pair.prefill.metrics().value("kv_transfer_bytes_per_second", transport="tcp") > 0


def test_auto_counts_only_tokens_that_are_not_cached(pair, prompts):
    shared = prompts(64)
    pair.decode.client.complete(shared, "local")

    answer = pair.decode.client.complete([*shared, *prompts(THRESHOLD - 1)], "auto")

    assert (answer.prefill, answer.cached_tokens) == ("local", 64)


def test_policy_file_takes_effect_while_running(pair, prompts):
    try:
        pair.decode.write_policy({"offload": {"prefillLengthThreshold": 32}})
        pair.decode.wait_for(
            lambda: pair.decode.client.complete(prompts(40), max_tokens=1).prefill == "remote",
            "the new threshold is in force",
        )
        pair.decode.write_policy({"offload": {"prefillLengthThreshold": "many"}})
        pair.decode.wait_for(
            lambda: "prefillLengthThreshold" in pair.decode.log_tail(), "the bad policy is reported"
        )
        assert pair.decode.client.complete(prompts(40), max_tokens=1).prefill == "remote"
    finally:
        pair.decode.write_policy({})
        pair.decode.wait_for(
            lambda: pair.decode.client.complete(prompts(40), max_tokens=1).prefill == "local",
            "the old threshold is back",
        )


# T12
def test_prefix_hit_at_the_decode_side_writes_only_missing_blocks(pair, prompts, reference):
    shared = prompts(5 * BLOCK)
    pair.decode.client.complete(shared, "local", max_tokens=1)
    prompt = [*shared, *prompts(2 * BLOCK + 3)]
    before = pair.decode.metrics()

    answer = pair.decode.client.complete(prompt, "remote")

    assert answer.prefill == "remote"
    reference.check(prompt, answer.tokens)
    pair.decode.wait_growth(
        before, "kv_transfer_bytes_total", 3 * pair.decode.block_bytes, direction="received"
    )


@pytest.mark.parametrize("place", ["local", "remote"])
def test_echo_gives_the_log_probabilities_of_transformers(pair, prompts, reference, place):
    prompt = prompts(THRESHOLD + 3)
    pair.decode.client.complete(prompt, "local", max_tokens=1)  # it is in the cache now
    requested = {
        "prompt": [prompt, prompt[:40]],
        "max_tokens": 0,
        "echo": True,
        "logprobs": 1,
        "pdcluster": {"prefill": place},
    }
    reply = pair.decode.client.post({"model": MODEL, **requested})
    choices = reply.json()["choices"]

    assert reply.headers["x-pdcluster-prefill"] == place
    for tokens, choice in zip((prompt, prompt[:40]), choices, strict=True):
        expected = reference.prompt_logprobs(tokens)
        chosen = [row[token].item() for row, token in zip(expected, tokens[1:], strict=True)]
        first, *said = choice["logprobs"]["token_logprobs"]
        assert first is None
        assert said == pytest.approx(chosen, abs=1e-4)
        assert [
            max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:]
        ] == pytest.approx(expected.amax(1).tolist(), abs=1e-4)


@pytest.mark.parametrize("num_tokens", [4 * BLOCK, 4 * BLOCK + 1])
def test_full_prefix_hit_with_forced_remote_moves_one_block(pair, prompts, reference, num_tokens):
    prompt = prompts(num_tokens)
    first = pair.decode.client.complete(prompt, "remote")
    before = pair.decode.metrics()

    second = pair.decode.client.complete(prompt, "remote")

    assert second.prefill == "remote"
    assert second.cached_tokens == (num_tokens - 1) // BLOCK * BLOCK  # [L7]
    assert second.tokens == first.tokens
    reference.check(prompt, second.tokens)
    pair.decode.wait_growth(
        before, "kv_transfer_bytes_total", pair.decode.block_bytes, direction="received"
    )


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_first_token_that_is_the_last_moves_no_kv(pair, prompts, reference, reason):
    prompt = prompts(50)
    (first,) = reference.greedy(prompt, 1)
    before = pair.decode.metrics()

    end = {"max_tokens": 1} if reason == "length" else {"stop_token_ids": [first]}
    answer = pair.decode.client.complete(prompt, "remote", **end)

    assert (answer.prefill, answer.choices[0].finish_reason) == ("remote", reason)
    assert answer.usage["completion_tokens"] == 1
    pair.decode.wait_growth(before, "remote_prefill_total", 1, outcome="ok")
    pair.cluster.wait_settled()
    assert pair.decode.growth(before, "kv_transfer_bytes_total", direction="received") == 0


def test_further_choices_start_from_the_cached_prompt(pair, prompts, reference):
    prompt = prompts(3 * BLOCK + 5)
    before = pair.decode.metrics()

    answer = pair.decode.client.complete(prompt, "remote", n=3)

    assert answer.prefill == "remote"
    assert len(answer.choices) == 3
    for choice in answer.choices:
        reference.check(prompt, choice.tokens)
    assert answer.usage["prompt_tokens"] == len(prompt)
    assert answer.usage["completion_tokens"] == sum(len(choice.tokens) for choice in answer.choices)
    pair.decode.wait_growth(before, "remote_prefill_total", 1, outcome="ok")
    pair.decode.wait_growth(before, "prefix_cache_hit_tokens_total", 2 * 3 * BLOCK)


def test_usage_tells_cached_tokens(pair, prompts):
    prompt = prompts(2 * BLOCK + 1)

    first, second = (pair.decode.client.complete(prompt, "local") for _ in range(2))

    assert first.usage == {
        "prompt_tokens": 33,
        "completion_tokens": 8,
        "total_tokens": 41,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (second.cached_tokens, second.tokens) == (2 * BLOCK, first.tokens)


def test_cached_blocks_are_private_per_salt_on_both_workers(pair, prompts, reference):
    """`local` shows the decode worker's cache, `remote` the prefill worker's own."""
    prompt = prompts(4 * BLOCK + 1)

    def cached(place: str, salt: str) -> int:
        answer = pair.decode.client.complete(prompt, place, cache_salt=salt)
        reference.check(prompt, answer.tokens)
        return answer.cached_tokens

    assert [cached("remote", "a"), cached("remote", "a"), cached("local", "a")] == [0, 64, 64]
    assert cached("local", "b") == 0
    assert [cached("remote", "c"), cached("remote", "c")] == [0, 64]


def test_stream_sends_the_place_with_the_first_token(pair, prompts, reference):
    for place in ("remote", "local"):
        prompt = prompts(70)
        with pair.decode.client.stream(
            prompt, place, stream_options={"include_usage": True}
        ) as stream:
            tokens = stream.read_all()
        assert (stream.prefill, stream.done, stream.finish_reason) == (place, True, "length")
        reference.check(prompt, tokens)


def test_list_of_prompts_goes_remote_prompt_by_prompt(pair, prompts, reference):
    cases = [prompts(30), prompts(45), prompts(5)]
    before = pair.decode.metrics()

    answer = answer_of(pair.decode.client.post({**body([], "remote"), "prompt": cases}))

    for prompt, choice in zip(cases, answer.choices, strict=True):
        reference.check(prompt, choice.tokens)
    pair.decode.wait_growth(before, "remote_prefill_total", 3, outcome="ok")


def test_openai_client_can_force_and_see_the_path(pair, prompts, reference):
    content = prompts(40)
    with openai.OpenAI(base_url=f"{pair.decode.client.http.base_url}/v1", api_key="none") as client:
        reply = client.chat.completions.with_raw_response.create(
            model=MODEL,
            messages=[{"role": "user", "content": text_of(content)}],
            temperature=0,
            max_completion_tokens=8,
            stream=True,
            extra_body={"pdcluster": {"prefill": "remote"}, "ignore_eos": True},
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in reply.parse())

    assert reply.headers["x-pdcluster-prefill"] == "remote"
    reference.check(chat_tokens(content), tokens_in(text))


def test_mixed_worker_does_both_phases(mixed, prompts, reference):
    prompt = prompts(THRESHOLD + 50)

    answer = mixed.client.complete(prompt, "auto")

    assert answer.prefill == "local"
    reference.check(prompt, answer.tokens)
