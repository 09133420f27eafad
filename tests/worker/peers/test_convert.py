"""Every value survives the wire, and no impossible one gets in."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pdcluster_worker.messages.constraint import Constraint
from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.facts import KVGeometry
from pdcluster_worker.messages.peers import Hello, WorkerLoad
from pdcluster_worker.messages.requests import (
    PromptLogprob,
    RequestSpec,
    SamplingParams,
    Token,
    TransferTarget,
)
from pdcluster_worker.peers import checks, convert
from pdcluster_worker.proto import worker_pb2 as pb

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


@given(specs)
def test_request_survives_the_wire(spec: RequestSpec) -> None:
    assert convert.request_from_proto(_sent(convert.request_to_proto(spec))) == spec


@given(targets)
def test_target_survives_the_wire(target: TransferTarget) -> None:
    assert convert.target_from_proto(_sent(convert.target_to_proto(target))) == target


@given(tokens)
def test_token_survives_the_wire(token: Token) -> None:
    assert convert.token_from_proto("q", _sent(convert.token_to_proto(token))) == token


@given(
    st.builds(PrefillDone, st.just("q"), longs, reals, st.none() | st.integers(0, 2**64 - 1), reals)
)
def test_prefill_done_survives_the_wire(done: PrefillDone) -> None:
    assert convert.done_from_proto("q", _sent(convert.done_to_proto(done))) == done


@given(
    st.builds(
        Hello,
        names,
        st.text(),
        geometries,
        st.text(),
        st.text(),
        st.integers(1, 8),
        st.text(),
        st.text(),
        naturals,
        naturals,
        naturals,
    )
)
def test_hello_survives_the_wire(hello: Hello) -> None:
    assert convert.hello_from_proto(_sent(convert.hello_to_proto(hello))) == hello


@given(
    st.builds(
        WorkerLoad,
        *(naturals, naturals, longs, naturals, longs, naturals, naturals, st.text(), longs),
        *(st.floats(min_value=0, allow_infinity=False), longs),
    )
)
def test_load_survives_the_wire(load: WorkerLoad) -> None:
    assert convert.load_from_proto(_sent(convert.load_to_proto(load))) == load


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"longest_step_seconds": float("inf")}, "longest_step_seconds is not a finite number"),
        ({"longest_step_seconds": float("nan")}, "longest_step_seconds is not a finite number"),
        ({"longest_step_seconds": -0.5}, "longest_step_seconds is negative"),
        ({"credit_tokens": -1}, "credit_tokens is negative"),
        ({"num_running": -1}, "num_running is negative"),
        ({"free_blocks": -1}, "free_blocks is negative"),
    ],
)
def test_impossible_load_is_refused(change: dict[str, Any], message: str) -> None:
    """A step without an end would be endless patience with that peer."""
    with pytest.raises(ValueError, match=message):
        convert.load_from_proto(pb.Load(**change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, -1]}, "prompt holds a negative"),
        ({"output": [-1]}, "output holds a negative"),
        ({"ttft_slo_seconds": 0.0}, "ttft_slo_seconds is not a time"),
        ({"deadline_seconds": float("inf")}, "deadline_seconds is not a time"),
        ({"tpot_slo_seconds": float("inf")}, "tpot_slo_seconds is not a time"),
    ],
)
def test_impossible_request_is_refused(change: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {
        "request_id": "q",
        "prompt": [1],
        "sampling": pb.Sampling(max_tokens=1),
    }

    with pytest.raises(ValueError, match=message):
        convert.request_from_proto(pb.Request(**(values | change)))


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 0},
        {"max_tokens": -5},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": float("inf")},
        {"top_p": -1.0},
        {"min_p": -1.0},
        {"repetition_penalty": -1.0},
        {"presence_penalty": float("nan")},
        {"top_k": -1},
        {"min_tokens": -1},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {-1: 1.0}},
        {"stop_token_ids": [-1]},
        {"eos_token_ids": [-1]},
    ],
)
def test_impossible_sampling_is_refused_by_name(change: dict[str, Any]) -> None:
    sampling = pb.Sampling(**({"max_tokens": 1} | change))
    with pytest.raises(ValueError, match=next(iter(change))):
        convert.request_from_proto(pb.Request(request_id="q", prompt=[1], sampling=sampling))


@pytest.mark.parametrize("name", ["top_k", "max_tokens", "stop_token_ids", "logit_bias", "seed"])
def test_numbers_of_more_bits_than_ours_are_refused(name: str) -> None:
    """MessagePack carries them, where the engine computes with 32 bits."""
    long = 1 << 64 if name == "seed" else 1 << 31
    value = {"stop_token_ids": [long], "logit_bias": {long: 1.0}}.get(name, long)
    sampling = replace(SamplingParams(max_tokens=1, seed=0), **{name: value})
    with pytest.raises(ValueError, match=name):
        checks.checked_request(RequestSpec("q", [1], sampling))


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
    values: dict[str, Any] = {
        "epoch": bytes(16),
        "engine_id": "e",
        "addresses": ["h:1"],
        "block_ids": [1],
    }

    with pytest.raises(ValueError, match=message):
        convert.target_from_proto(pb.Target(**(values | change)))


@pytest.mark.parametrize("message", [pb.Token(token_id=-1), pb.Token(finish_reason="tired")])
def test_impossible_token_is_refused(message: pb.Token) -> None:
    with pytest.raises(ValueError, match=r"token_id|finish_reason"):
        convert.token_from_proto("q", message)


def test_impossible_end_of_a_prefill_is_refused() -> None:
    with pytest.raises(ValueError, match="num_bytes"):
        convert.done_from_proto("q", pb.PrefillDone(num_bytes=-1))


def test_hello_of_a_worker_that_knows_no_ranks_is_of_one() -> None:
    assert convert.hello_from_proto(pb.Hello(engine_id="e")).tensor_parallel_size == 1
    sized = convert.hello_from_proto(pb.Hello(engine_id="e", tensor_parallel_size=4))
    assert convert.hello_from_proto(convert.hello_to_proto(sized)).tensor_parallel_size == 4
    stock = convert.hello_from_proto(pb.Hello(engine_id="e", restarts_grammar=True))
    assert convert.hello_from_proto(convert.hello_to_proto(stock)) == stock != sized
    with pytest.raises(ValueError, match="tensor_parallel_size is negative"):
        convert.hello_from_proto(pb.Hello(engine_id="e", tensor_parallel_size=-1))


@pytest.mark.parametrize("name", ["max_model_len", "vocab_size", "max_batched_tokens"])
def test_hello_of_a_negative_limit_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is negative"):
        convert.hello_from_proto(pb.Hello(engine_id="e", **{name: -1}))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "poem"}, "constraint of kind 'poem' is unknown"),
        ({"kind": "regex", "text": 131_073 * "a"}, "constraint has 131073 characters, over 131072"),
    ],
)
def test_a_constraint_that_no_ingress_sends_is_refused(wrong: dict[str, Any], words: str) -> None:
    message = convert.sampling_to_proto(SamplingParams(max_tokens=1, seed=0))
    message.constraint.CopyFrom(pb.Constraint(**wrong))

    with pytest.raises(ValueError, match=words):
        convert.request_from_proto(pb.Request(request_id="q", prompt=[1], sampling=message))


def test_losses_are_taken_as_far_as_a_header_can_say_them() -> None:
    good = ["max_tokens=2", "prefill=local"]

    assert checks.losses([*good, "a\r\nset-cookie: b", "\u2603", "", 65 * "a"]) == tuple(good)
    assert len(checks.losses(1000 * good)) == 8


def test_hello_without_an_engine_is_refused() -> None:
    with pytest.raises(ValueError, match="engine_id"):
        convert.hello_from_proto(pb.Hello())


def _sent(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())
