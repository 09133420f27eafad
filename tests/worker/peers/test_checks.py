"""Every value survives the wire, and no impossible one gets in."""

from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.peers import (
    Hello,
    PrefillCall,
    PrefillReply,
    PrefixPushed,
    PushPrefix,
    Report,
    TraceEvent,
    WorkerLoad,
    decode_hello,
    decode_report,
    encode,
)
from pdcluster_worker.messages.requests import (
    Constraint,
    Image,
    PromptLogprob,
    RequestSpec,
    SamplingParams,
    Token,
    TransferTarget,
)
from pdcluster_worker.peers import checks
from pdcluster_worker.peers.checks import MAX_CHARACTERS, MAX_EVENTS, MAX_FACTS, sanitize_events

SPEC = RequestSpec("q", [1], SamplingParams(max_tokens=1, seed=0))
TARGET = TransferTarget(bytes(16), "e", ["h:1"], 0, [1])
DONE = PrefillDone("q", 1, 0.5)
PNG = "data:image/png;base64,cmVk"

naturals = st.integers(0, 2**31 - 1)
longs = st.integers(0, 2**63 - 1)
reals = st.floats(allow_nan=False, allow_infinity=False)
positives = st.floats(0, 1e9)
names = st.text(min_size=1, max_size=8)
ids = st.lists(naturals, max_size=5)

constraints = st.builds(
    Constraint,
    kind=st.sampled_from(
        ["json_schema", "json_object", "regex", "choice", "grammar", "structural_tag"]
    ),
    text=st.text(max_size=8),
    strict=st.booleans(),
)
samplings = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31 - 1),
    seed=st.integers(0, 2**64 - 1),
    temperature=positives,
    top_p=positives,
    top_k=naturals,
    min_p=positives,
    presence_penalty=reals,
    frequency_penalty=reals,
    repetition_penalty=positives,
    logit_bias=st.dictionaries(naturals, reals, max_size=3),
    logprobs=st.none() | naturals,
    prompt_logprobs=st.none() | naturals,
    min_tokens=naturals,
    stop_token_ids=ids,
    eos_token_ids=ids,
    ignore_eos=st.booleans(),
    constraint=st.none() | constraints,
)
specs = st.builds(
    RequestSpec,
    request_id=names,
    prompt=st.lists(naturals, min_size=1, max_size=5),
    sampling=samplings,
    output=ids,
    priority=st.integers(-(2**31), 2**31 - 1),
    cache_salt=st.just(b"") | st.binary(min_size=32, max_size=32),
    ttft_slo_seconds=st.none() | positives.filter(bool),
    tpot_slo_seconds=st.none() | positives.filter(bool),
    deadline_seconds=st.none() | positives.filter(bool),
    kv_holder=st.just("") | names,
    tenant=st.just("") | names,
    prefiller=st.just("") | names,
    images=st.just([]) | st.just([Image(0, 1, "red", PNG)]),
)
targets = st.builds(
    TransferTarget,
    epoch=st.binary(min_size=16, max_size=16),
    engine_id=names,
    addresses=st.lists(names, min_size=1, max_size=8),
    cached_tokens=naturals,
    block_ids=st.lists(naturals, min_size=1, max_size=5, unique=True),
)
tokens = st.builds(
    Token,
    request_id=st.just("q"),
    token_id=naturals,
    logprob=st.none() | st.floats(allow_nan=False),
    top_logprobs=st.lists(st.tuples(naturals, st.floats(allow_nan=False)), max_size=3),
    finish_reason=st.sampled_from([None, "stop", "length"]),
    stop_reason=st.none() | naturals,
    cached_tokens=naturals,
    queue_seconds=st.none() | reals,
    prefill_seconds=st.none() | reals,
    prompt_logprobs=st.lists(
        st.builds(
            PromptLogprob, naturals, naturals, st.lists(st.tuples(naturals, reals), max_size=2)
        ),
        max_size=2,
    ),
)
geometries = st.builds(
    KVGeometry,
    num_kv_heads=naturals,
    head_dim=naturals,
    num_layers=naturals,
    block_size=naturals,
    dtype=st.text(),
    kind=st.text(),
)


dones = st.builds(
    PrefillDone, st.just("q"), longs, reals, st.none() | st.integers(0, 2**64 - 1), reals
)
hellos = st.builds(
    Hello,
    *(names, st.text(), geometries, st.text(), st.text(), st.integers(1, 8)),
    *(st.text(), st.text(), naturals, naturals, naturals, st.booleans()),
)
loads = st.builds(
    WorkerLoad,
    *(naturals, naturals, longs, naturals, longs, naturals, naturals, st.text(), longs),
    *(st.floats(min_value=0, max_value=1e300), longs),
)


@pytest.mark.parametrize(
    ("messages", "parse"),
    [
        (st.builds(PrefillCall, specs, names, targets, names), checks.parse_prefill),
        (st.builds(PushPrefix, st.just("p"), st.just("d"), specs), checks.parse_push_prefix),
        (targets, checks.parse_target),
        (st.builds(PrefixPushed, tokens, dones), partial(checks.parse_prefix_pushed, "q")),
        (hellos, decode_hello),
        (
            st.builds(Report, loads, st.just((b"a",)), st.just((b"b",)), st.just(True), st.just(7)),
            decode_report,
        ),
    ],
    ids=["prefill", "push of a prefix", "target", "prefix pushed", "hello", "report"],
)
@given(st.data())
def test_message_survives_the_wire(
    messages: st.SearchStrategy[Any], parse: Callable[[bytes], Any], data: st.DataObject
) -> None:
    message = data.draw(messages)
    assert parse(encode(message)) == message


@given(tokens, dones)
def test_answers_of_a_prefill_survive_the_wire(token: Token, done: PrefillDone) -> None:
    for reply in (PrefillReply(first_token=token), PrefillReply(done=done)):
        assert checks.parse_prefill_reply("q", encode(reply)) == (reply.first_token or reply.done)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("longest_step_seconds", float("inf")),
        ("longest_step_seconds", float("nan")),
        ("longest_step_seconds", -0.5),
        ("busy_ratio", float("nan")),
        ("credit_tokens", -1),
        ("num_running", -1),
        ("free_blocks", -1),
    ],
)
def test_impossible_load_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"\$\.load\.{name}"):
        decode_report(encode(Report(replace(WorkerLoad(), **{name: value}))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, -1]}, "prompt holds a negative"),
        ({"output": [-1]}, "output holds a negative"),
        ({"cache_salt": b"short"}, "cache_salt has 5 bytes"),
        ({"priority": 1 << 32}, "priority is not of 32 bits"),
        ({"ttft_slo_seconds": 0.0}, "ttft_slo_seconds is not a time"),
        ({"deadline_seconds": float("inf")}, "deadline_seconds is not a time"),
        ({"group": "g" * 101}, "group has over 100 characters"),
        ({"tpot_slo_seconds": float("inf")}, "tpot_slo_seconds is not a time"),
        ({"images": [Image(0, 2, "a", PNG)]}, "an image ends after the prompt"),
        ({"images": [Image(-1, 1, "a", PNG)]}, "images overlap, or have no tokens"),
        ({"images": [Image(0, 0, "a", PNG)]}, "images overlap, or have no tokens"),
        ({"images": [Image(0, 1, "a", PNG)] * 2}, "images overlap, or have no tokens"),
        ({"images": [Image(0, 1, "a", "http://h/a.png")]}, "the URL of an image is not data:image"),
    ],
)
def test_impossible_request_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checks.parse_push_prefix(encode(PushPrefix("p", "d", replace(SPEC, **change))))


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"max_tokens": 1 << 31},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": float("inf")},
        {"top_p": -1.0},
        {"min_p": -1.0},
        {"repetition_penalty": -1.0},
        {"presence_penalty": float("nan")},
        {"top_k": -1},
        {"top_k": 1 << 31},
        {"min_tokens": -1},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {1 << 31: 1.0}},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [1 << 31]},
        {"eos_token_ids": [-1]},
        {"constraint": Constraint("regex", 131_073 * "a")},
    ],
    ids=str,
)
def test_impossible_sampling_is_refused_by_name(change: dict[str, Any]) -> None:
    spec = replace(SPEC, sampling=replace(SPEC.sampling, **change))
    with pytest.raises(ValueError, match=next(iter(change))):
        checks.parse_prefill(encode(PrefillCall(spec, "p", TARGET)))


def test_seed_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="seed"):
        checks.checked_request(replace(SPEC, sampling=replace(SPEC.sampling, seed=1 << 64)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": b"short"}, "epoch has 5 bytes instead of 16"),
        ({"engine_id": ""}, "engine_id"),
        ({"addresses": []}, "0 addresses, not 1 to 8"),
        ({"addresses": ["h:1"] * 9}, "9 addresses, not 1 to 8"),
        ({"addresses": ["h:1", ""]}, "address of the target is empty"),
        ({"cached_tokens": -1}, "cached_tokens is negative"),
        ({"block_ids": [1, -2]}, "block_ids holds a negative"),
        ({"block_ids": [1, 1]}, "block_ids names a block twice"),
    ],
)
def test_impossible_target_is_refused(change: dict[str, Any], message: str) -> None:
    target = replace(TARGET, **change)
    with pytest.raises(ValueError, match=message):
        checks.parse_target(encode(target))
    with pytest.raises(ValueError, match=message):
        checks.parse_prefill(encode(PrefillCall(SPEC, "p", target)))


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (PrefillReply(), "are missing"),
        (PrefillReply(first_token=Token("q", -1)), "token_id"),
        (PrefillReply(first_token=Token("another", 1)), "of another request"),
        (PrefillReply(first_token=Token("q", 1, finish_reason="tired")), "finish_reason"),
        (PrefillReply(done=PrefillDone("q", -1, 0.0)), "num_bytes"),
        (PrefillReply(done=PrefillDone("q", 1, float("nan"))), "seconds is not a finite"),
        (PrefillReply(done=PrefillDone("another", 1, 0.0)), "of another request"),
    ],
)
def test_impossible_answer_of_a_prefill_is_refused(reply: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checks.parse_prefill_reply("q", encode(reply))


def test_texts_of_a_transfer_are_bounded() -> None:
    done = replace(DONE, transport="t" * 999, transport_note="n" * 9999)
    pushed = checks.parse_prefix_pushed("q", encode(PrefixPushed(Token("q", 1), done)))

    assert pushed.done.transport == "t" * 32
    assert len(pushed.done.transport_note) <= 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("engine_id", ""),
        ("tensor_parallel_size", 0),
        ("max_model_len", -1),
        ("vocab_size", -1),
        ("max_batched_tokens", -1),
    ],
)
def test_impossible_hello_is_refused_by_name(name: str, value: Any) -> None:
    hello = Hello("e", "decode", KVGeometry(1, 1, 1, 1, "float32"), "w", "r1")
    with pytest.raises(ValueError, match=name):
        decode_hello(encode(replace(hello, **{name: value})))


def test_constraint_of_an_unknown_kind_is_refused() -> None:
    sampling = replace(SPEC.sampling, constraint=Constraint("poem"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'poem'.*constraint\.kind"):
        checks.parse_push_prefix(encode(PushPrefix("p", "d", replace(SPEC, sampling=sampling))))


def test_losses_are_taken_as_far_as_a_header_can_say_them() -> None:
    good = ["max_tokens=2", "prefill=local"]

    assert checks.losses([*good, "a\r\nset-cookie: b", "\u2603", "", 65 * "a"]) == tuple(good)
    assert len(checks.losses(1000 * good)) == 8


def test_numbers_without_an_end_are_left_out() -> None:
    facts = {"cost": nan, "rate": inf, "share": 0.5, "queue": 2, "is_last": True}
    notes = sanitize_events(
        [TraceEvent("late", inf, {}), TraceEvent("offload", 0.5, facts)], 10.0, "d1"
    )

    assert notes == (
        TraceEvent("offload", 10.5, {"share": 0.5, "queue": 2, "is_last": True}, "d1"),
    )


def test_number_and_length_of_what_a_peer_says_are_bounded() -> None:
    said = [
        TraceEvent("n" * 9999, 0.0, {"n" * 9999: "t" * 9999}),
        TraceEvent("many", 0.0, {f"f{number}": number for number in range(2 * MAX_FACTS)}),
    ]
    first, second, *others = sanitize_events([*said, *[TraceEvent("", 0.0, {})] * 999], 0.0, "d1")

    assert (first.name, first.facts) == (
        "n" * MAX_CHARACTERS,
        {"n" * MAX_CHARACTERS: "t" * MAX_CHARACTERS},
    )
    assert len(second.facts) == MAX_FACTS
    assert len(others) == MAX_EVENTS - 2
