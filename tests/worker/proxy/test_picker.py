"""The choice of a worker for a request without tokens."""

import pytest

from pdcluster_schema.routing import DecodeScoreSpec, RelayingSpec
from pdcluster_worker.proxy.picker import Candidate, Picker, affinity_of

LEAST, TURNS = RelayingSpec(), RelayingSpec(policy="roundRobin")
TEXT = RelayingSpec(policy="textPrefix")
SCORE = DecodeScoreSpec()


def chooser_of(*pods: str) -> tuple[Picker[Candidate], list[Candidate]]:
    picker: Picker[Candidate] = Picker()
    members = [Candidate(pod) for pod in pods]
    picker.set(members)
    return picker, members


def chosen(picker: Picker[Candidate], policy: RelayingSpec, number: int) -> list[str]:
    """The next so many, each of which stays under way."""
    pods = []
    for _ in range(number):
        found = picker.choose(policy, SCORE, b"", ())
        assert found is not None
        picker.begin(found)
        pods.append(found.pod)
    return pods


def test_round_robin_takes_one_after_the_other() -> None:
    picker, _ = chooser_of("a", "b", "c")
    assert chosen(picker, TURNS, 4) == ["b", "c", "a", "b"]


def test_fewest_requests_count_those_of_other_routers() -> None:
    picker, (a, b, c) = chooser_of("a", "b", "c")
    picker.report(a, 2)
    picker.report(b, 1)

    assert chosen(picker, LEAST, 5) == ["c", "b", "c", "a", "b"]
    picker.end(c)
    picker.end(c)
    assert chosen(picker, LEAST, 1) == ["c"]


def test_a_report_counts_our_own_requests_once() -> None:
    picker, (a, _) = chooser_of("a", "b")
    chosen(picker, LEAST, 2)
    picker.report(a, 1)
    assert a.num_requests == 1


def test_equals_take_turns() -> None:
    picker, (a, b) = chooser_of("a", "b")
    pods = []
    for _ in range(4):
        pods += chosen(picker, LEAST, 1)
        picker.end(a if pods[-1] == "a" else b)
    assert pods == ["a", "b", "a", "b"]


@pytest.mark.parametrize("policy", [LEAST, TURNS, TEXT])
def test_a_worker_that_was_tried_is_not_chosen_again(policy: RelayingSpec) -> None:
    picker, (a, b) = chooser_of("a", "b")

    assert picker.choose(policy, SCORE, b"x", [a]) is b
    assert picker.choose(policy, SCORE, b"x", [a, b]) is None


@pytest.mark.parametrize("policy", [LEAST, TURNS, TEXT])
def test_without_workers_there_is_none(policy: RelayingSpec) -> None:
    assert chooser_of()[0].choose(policy, SCORE, b"x", ()) is None


def test_a_worker_that_has_gone_ends_its_requests_without_a_trace() -> None:
    picker, (a, b) = chooser_of("a", "b")
    picker.begin(a)
    picker.set([b])
    picker.end(a)

    assert (a.in_flight, chosen(picker, LEAST, 2)) == (0, ["b", "b"])


def home(picker: Picker[Candidate], text: str) -> str:
    found = picker.choose(TEXT, SCORE, text.encode(), ())
    assert found is not None
    return found.pod


def test_text_has_a_home_and_a_worker_that_goes_takes_only_its_own_along() -> None:
    pods = [f"w{number}" for number in range(8)]
    before = {str(text): home(chooser_of(*pods)[0], str(text)) for text in range(200)}
    after = {text: home(chooser_of(*pods[1:])[0], text) for text in before}

    assert {*before.values()} == {*pods}
    assert all(after[text] == pod for text, pod in before.items() if pod != "w0")


def test_text_draws_no_more_than_a_share_to_one_worker() -> None:
    picker, members = chooser_of("a", "b", "c", "d")
    for _ in range(40):
        found = picker.choose(TEXT, SCORE, b"the same", ())
        assert found is not None
        picker.begin(found)

    assert max(member.in_flight for member in members) <= 15  # 1.5 times the mean of 10

    free = SCORE.__class__(hotspot_prevention=False)
    first = picker.choose(TEXT, free, b"the same", ())
    for _ in range(9):
        assert picker.choose(TEXT, free, b"the same", ()) is first


@pytest.mark.parametrize(
    ("body", "affinity"),
    [
        (b'{"pdcluster": {"session": "s"}, "prompt": "p"}', b"s"),
        (b'{"pdcluster": {"session": 3}, "prompt": "p"}', b""),
        (b'{"prompt": "a \\"session\\" of \\"pdcluster\\""}', b""),
        (b'{"session": 1', b""),
        (b'{"pdcluster": {"session": "\\ud800"}}', b""),
    ],
)
def test_a_session_goes_before_the_policy(body: bytes, affinity: bytes) -> None:
    assert affinity_of(LEAST, SCORE, body) == affinity
    assert affinity_of(LEAST, DecodeScoreSpec(session_affinity=False), body) == b""


def test_text_begins_at_the_prompt_and_is_cut() -> None:
    policy = RelayingSpec(policy="textPrefix", prefix_bytes=64)
    prompt = b'"prompt": "' + b"x" * 200
    one, other = b'{"model": "m", ' + prompt + b'1"}', b'{"seed": 3, ' + prompt + b'2"}'

    assert affinity_of(policy, SCORE, one) == affinity_of(policy, SCORE, other) == prompt[:64]
    assert affinity_of(policy, SCORE, b"{}") == b""
