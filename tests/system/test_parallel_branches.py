"""Choices of one prompt on several decode workers: one prefill, its KV read once by each worker,
and the tokens of one worker.

One prefill and three decode workers.  Requests come to the first decode worker.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from tests.system.client import Choice, answer_of, body
from tests.system.cluster import Cluster, NewCluster
from tests.system.sampled import SAMPLED, SAMPLING
from tests.system.tokens import text_of, tokens_in
from tests.system.waiting import wait_for
from tests.system.worker_process import SETTLE_SECONDS, Metrics, WorkerProcess

BLOCK = 16
NUM_CHOICES = 8
PROMPT = 20 * BLOCK + 5  # over the default threshold of 256
MAX_TOKENS = 100
LONG = 400  # long enough to end a worker in the middle
SPREAD, TOGETHER = {"branches": "Spread"}, {"branches": "Local"}


@dataclass(frozen=True)
class Fan:
    """A prefill worker and three decode workers, of which the first is the ingress."""

    cluster: Cluster
    prefill: WorkerProcess
    decodes: list[WorkerProcess]

    @property
    def ingress(self) -> WorkerProcess:
        return self.decodes[0]

    def metrics(self) -> list[Metrics]:
        return [decode.metrics() for decode in self.decodes]

    def together(self, prompt: list[int], **fields: Any) -> list[Choice]:
        """Choices of the same request as one worker makes them."""
        self.ingress.take_policy(TOGETHER)
        before = self.ingress.metrics()
        try:
            answer = self.ingress.client.complete(prompt, n=NUM_CHOICES, **fields)
        finally:
            self.ingress.take_policy(SPREAD)
        assert self.ingress.growth(before, "request_branches_total", place="moved") == 0
        return answer.choices


@pytest.fixture(scope="module")
def fan_cluster(open_cluster: NewCluster) -> Iterator[Fan]:
    with open_cluster("fan") as cluster:
        prefill = cluster.add_worker("prefill", "fan-prefill-0")
        prefill.wait_ready()
        decodes = [cluster.add_worker("decode", f"fan-decode-{index}") for index in range(3)]
        decodes[0].wait_ready()
        decodes[0].take_policy(SPREAD)
        yield Fan(cluster, prefill, decodes)


@pytest.fixture
def fan(fan_cluster: Fan) -> Iterator[Fan]:
    fan_cluster.cluster.heal()
    for decode in fan_cluster.decodes:
        wait_for(
            lambda decode=decode: decode.num_decode_peers() == 2,
            SETTLE_SECONDS,
            f"{decode.name} knows two decode peers",
        )
    yield fan_cluster
    fan_cluster.cluster.wait_settled()


def made_tokens(fan: Fan, before: list[Metrics]) -> list[float]:
    """Tokens that each decode worker has made."""
    return [
        decode.growth(then, "generation_tokens_total")
        for decode, then in zip(fan.decodes, before, strict=True)
    ]


def test_prompt_is_computed_once_and_sent_once_to_each_worker(fan, prompts, reference):
    prompt, before, prefill_before = prompts(PROMPT), fan.metrics(), fan.prefill.metrics()
    answer = fan.ingress.client.complete(prompt, n=NUM_CHOICES, max_tokens=MAX_TOKENS)

    assert (answer.prefill, answer.usage["prompt_tokens"]) == ("remote", PROMPT)
    assert answer.usage["completion_tokens"] == NUM_CHOICES * MAX_TOKENS
    for choice in answer.choices:
        reference.check(prompt, choice.tokens)
    moved = fan.ingress.growth(before[0], "request_branches_total", place="moved")
    fan.ingress.wait_growth(
        before[0], "request_branches_total", NUM_CHOICES - 1 - moved, place="home"
    )
    assert moved > 0
    fan.cluster.wait_settled()
    made = made_tokens(fan, before)
    for decode, then, tokens in zip(fan.decodes, before, made, strict=True):
        num_copies = 1 if tokens else 0
        num_bytes = num_copies * -(-PROMPT // BLOCK) * decode.block_bytes
        decode.wait_growth(then, "kv_transfer_bytes_total", num_bytes, direction="received")
        reads = 0 if decode is fan.ingress else num_copies
        decode.wait_growth(then, "kv_handovers_total", reads, outcome="ok")
    assert fan.prefill.growth(prefill_before, "engine_step_tokens_sum", kind="prefill") == PROMPT


def test_prefix_of_a_list_of_prompts_is_computed_once_for_all_workers(fan, prompts, reference):
    shared = prompts(PROMPT - 5)
    requested = [[*shared, *prompts(20)] for _ in range(6)]
    before, prefill_before = fan.metrics(), fan.prefill.metrics()
    reply = fan.ingress.client.post({**body([]), "prompt": requested, "max_tokens": 20})

    for prompt, choice in zip(requested, answer_of(reply).choices, strict=True):
        reference.check(prompt, choice.tokens)
    fan.cluster.wait_settled()
    num_used = sum(tokens > 0 for tokens in made_tokens(fan, before))
    computed = fan.prefill.growth(prefill_before, "engine_step_tokens_sum", kind="prefill")
    assert num_used > 1
    assert computed <= len(shared) + num_used * (20 + BLOCK)


@pytest.mark.parametrize("place", ["local", "remote"])
@pytest.mark.parametrize(
    "fields", [{**SAMPLED, "max_tokens": MAX_TOKENS}, {"logprobs": 2, "max_tokens": MAX_TOKENS}]
)
def test_choices_are_those_of_one_worker(fan, prompts, reference, place, fields):
    prompt = prompts(PROMPT)
    before = fan.ingress.metrics()
    spread = fan.ingress.client.complete(prompt, place, n=NUM_CHOICES, **fields).choices
    assert fan.ingress.growth(before, "request_branches_total", place="moved") > 0
    together = fan.together(prompt, prefill=place, **fields)

    for index, (one, other) in enumerate(zip(spread, together, strict=True)):
        if "seed" in fields:
            sampling = replace(SAMPLING, max_tokens=MAX_TOKENS, seed=SAMPLING.seed + index)
            reference.check_sampled(prompt, other.tokens, one.tokens, sampling)
        else:
            reference.check(prompt, one.tokens)
        if one.tokens == other.tokens:
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    if "seed" in fields:
        assert len({tuple(choice.tokens) for choice in spread}) == NUM_CHOICES


def test_stop_string_ends_its_choices_alone(fan, prompts):
    prompt, fields = prompts(PROMPT), {**SAMPLED, "max_tokens": MAX_TOKENS}
    whole = fan.together(prompt, **fields)
    stop = text_of([whole[-1].tokens[40]])  # of a choice that goes elsewhere
    spread = fan.ingress.client.complete(prompt, n=NUM_CHOICES, stop=stop, **fields).choices

    for one, other in zip(spread, whole, strict=True):
        cut = text_of(other.tokens).split(stop)[0]
        assert one.tokens == tokens_in(cut)
        assert one.finish_reason == ("stop" if cut != text_of(other.tokens) else "length")


def test_choices_of_a_killed_worker_go_on_elsewhere(fan, prompts, reference):
    prompt, before = prompts(PROMPT), fan.ingress.metrics()
    with fan.ingress.client.stream(prompt, n=NUM_CHOICES, max_tokens=LONG) as stream:
        while len(stream.texts) < NUM_CHOICES:
            assert stream.next()
        fan.decodes[1].kill()
        stream.read_all()

    assert (stream.done, stream.error) == (True, None)
    assert [len(tokens_in(stream.texts[index])) for index in range(NUM_CHOICES)] == [
        LONG
    ] * NUM_CHOICES
    for index in range(NUM_CHOICES):
        reference.check_whole(prompt, tokens_in(stream.texts[index]))
    moves = fan.ingress.growth(before, "request_moves_total", reason="lost", outcome="moved")
    assert moves > 0


def test_choices_leave_a_worker_that_drains(fan, prompts, reference):
    prompt, leaving = prompts(PROMPT), fan.decodes[2]
    with fan.ingress.client.stream(prompt, n=NUM_CHOICES, max_tokens=LONG) as stream:
        while len(stream.texts) < NUM_CHOICES:
            assert stream.next()
        with fan.cluster.drained_by_command(leaving.name):
            fan.cluster.wait_state(leaving.name, "drained")
            stream.read_all()
    leaving.wait_ready()

    assert (stream.done, stream.error) == (True, None)
    for index in range(NUM_CHOICES):
        tokens = tokens_in(stream.texts[index])
        assert len(tokens) == LONG
        reference.check_whole(prompt, tokens)


def test_client_that_leaves_ends_the_choices_on_every_worker(fan, prompts):
    before = fan.metrics()
    with fan.ingress.client.stream(prompts(PROMPT), n=NUM_CHOICES, max_tokens=1500) as stream:
        while len(stream.texts) < NUM_CHOICES:
            assert stream.next()

    fan.cluster.wait_settled()
    made = made_tokens(fan, before)
    assert sum(tokens > 0 for tokens in made) > 1
    assert sum(made) < NUM_CHOICES * 1500 / 2
