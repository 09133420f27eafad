"""Windows of rounds: what counts, what is stale, what is forgotten."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_api.plan.autoscale.histogram import LatencyHistogram
from pdcluster_api.plan.autoscale.rules import MAX_ROUNDS
from pdcluster_operator.scrape.page import Miss, Reason, ScrapeResult, ScrapeTarget
from pdcluster_operator.scrape.windows import Windows
from tests.operator.pdcluster_operator.scrape.pages import page_of

CHAT = ("serving", "chat")
PREFILL = ("prefill", "b200")
DECODE = ("decode", "b300")
STALE_AFTER = 3
MISS = Miss(Reason.TIMEOUT, "too slow")


def target(
    pod: str,
    pool: tuple[str, str] = PREFILL,
    *,
    address: str | None = None,
    cluster: tuple[str, str] = CHAT,
) -> ScrapeTarget:
    return ScrapeTarget(cluster, *pool, pod, address or f"{pod}:8000")


def good(at: float, who: ScrapeTarget, **numbers: float) -> ScrapeResult:
    return ScrapeResult(who, at, 0.01, page_of(**numbers))


def bad(at: float, who: ScrapeTarget) -> ScrapeResult:
    return ScrapeResult(who, at, 2.0, MISS)


def rounds_of(*rounds: list[ScrapeResult], step: float = 5.0) -> Windows:
    """Rounds that end at 0, 5, 10, ..."""
    windows = Windows(CHAT)
    for number, answers in enumerate(rounds):
        windows.add(number * step, answers, STALE_AFTER)
    return windows


def test_window_has_a_sample_for_each_round_and_pool():
    windows = Windows(CHAT)
    for at in (0.0, 5.0):
        answers = [
            good(at, target("p-1"), num_requests_running=1),
            good(at, target("d-0", DECODE)),
            good(at, target("p-0"), num_requests_running=at),
        ]
        windows.add(at, answers, STALE_AFTER)

    found = windows.pools()

    assert set(found) == {PREFILL, DECODE}
    assert [sample.at for sample in found[PREFILL]] == [0.0, 5.0]
    assert [[worker.pod for worker in sample.workers] for sample in found[PREFILL]] == [
        ["p-0", "p-1"]
    ] * 2
    assert [sample.workers[0].num_requests_running for sample in found[PREFILL]] == [0.0, 5.0]
    assert [sample.workers[0].prompt_token_rate for sample in found[PREFILL]] == [None, 0.0]


def test_worker_that_misses_keeps_its_numbers_until_it_has_missed_too_many():
    who = target("p-0")
    windows = rounds_of(
        [good(0.0, who, num_requests_running=7)],
        *([bad(at, who)] for at in (5.0, 10.0, 15.0, 20.0)),
    )

    samples = windows.pools()[PREFILL]

    assert [[worker.num_requests_running for worker in sample.workers] for sample in samples] == [
        [7.0]
    ] * 4 + [[]]
    assert [sample.stale for sample in samples] == [()] * 4 + [("p-0",)]
    assert windows.stale() == {"p-0": MISS}


def test_good_answer_ends_misses_and_rates_go_over_the_gap():
    who = target("p-0")
    windows = rounds_of(
        [good(0.0, who)],
        [bad(5.0, who)],
        [bad(10.0, who)],
        [good(15.0, who, prompt_tokens_total=30)],
    )

    assert windows.pools()[PREFILL][-1].workers[0].prompt_token_rate == 2.0


def test_stale_worker_starts_over():
    who = target("p-0")
    windows = rounds_of(
        [good(0.0, who)], *([[bad(1.0, who)]] * 4), [good(25.0, who, prompt_tokens_total=30)]
    )

    newest = windows.pools()[PREFILL][-1]

    assert newest.stale == ()
    assert newest.workers[0].prompt_token_rate is None
    assert windows.stale() == {}


def test_pod_at_another_address_is_another_worker():
    """Neither its counters nor its misses are those of the pod that had its name before."""
    old, new = target("p-0"), target("p-0", address="10.0.0.9:8000")
    windows = rounds_of(
        [good(0.0, old, prompt_tokens_total=5, num_requests_running=9)],
        [bad(5.0, old)],
        [bad(10.0, new)],
    )
    assert windows.pools()[PREFILL][-1].workers == ()

    windows.add(15.0, [good(15.0, new, prompt_tokens_total=50)], STALE_AFTER)
    assert windows.pools()[PREFILL][-1].workers[0].prompt_token_rate is None


def test_pod_that_is_gone_is_forgotten():
    stays, goes = target("p-0"), target("p-1")
    windows = rounds_of(
        [good(0.0, stays), good(0.0, goes)],
        [good(5.0, stays)],
        [good(10.0, stays), bad(10.0, goes)],
    )

    assert [[worker.pod for worker in sample.workers] for sample in windows.pools()[PREFILL]] == [
        ["p-0", "p-1"],
        ["p-0"],
        ["p-0"],
    ]


def test_pool_without_targets_is_forgotten():
    windows = rounds_of(
        [good(0.0, target("p-0")), good(0.0, target("d-0", DECODE))],
        [good(5.0, target("d-0", DECODE))],
    )

    assert set(windows.pools()) == {DECODE}
    assert list(windows.newest()) == [DECODE]


def test_cluster_without_targets_is_forgotten():
    windows = rounds_of([good(0.0, target("p-0"))], [])

    assert windows.pools() == {}
    assert windows.newest() == {}


@pytest.mark.parametrize("step", [1.0, 5.0, 3600.0])
def test_window_is_bounded_in_rounds_however_far_apart(step: float):
    who = target("p-0")
    windows = rounds_of(*([good(step * number, who)] for number in range(100)), step=step)

    assert [sample.at for sample in windows.pools()[PREFILL]] == [
        step * number for number in range(100 - MAX_ROUNDS, 100)
    ]


def test_newest_tells_when_a_pool_last_answered():
    windows = rounds_of(
        [good(1.0, target("p-0")), good(2.0, target("p-1")), bad(3.0, target("d-0", DECODE))],
        [bad(6.0, target("p-1"))],
    )
    assert [
        (pool, sample.at, windows.answered_at(pool)) for pool, sample in windows.newest().items()
    ] == [(PREFILL, 5.0, 2.0)]

    windows.add(10.0, [bad(10.0, target("d-0", DECODE))], STALE_AFTER)
    assert [(pool, windows.answered_at(pool)) for pool in windows.newest()] == [(DECODE, None)]


@pytest.mark.parametrize("stale_after", [1, 2, 5])
@settings(deadline=None)
@given(data=st.data())
def test_staleness_is_that_of_the_misses_in_a_row(stale_after: int, data: st.DataObject):
    histories = data.draw(
        st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=1, max_size=3)
    )
    windows = Windows(CHAT)
    for number in range(8):
        answers = [
            (good if history[number] else bad)(float(number), target(f"p-{pod}"))
            for pod, history in enumerate(histories)
        ]
        windows.add(float(number), answers, stale_after)
        newest = windows.pools()[PREFILL][-1]
        for pod, history in enumerate(histories):
            past = history[: number + 1]
            recent = past[-stale_after - 1 :]
            is_stale = len(past) > stale_after and not any(recent)
            assert (f"p-{pod}" in newest.stale) == is_stale
            assert (f"p-{pod}" in [worker.pod for worker in newest.workers]) == any(recent)


def latencies(number: float) -> dict[str, LatencyHistogram]:
    return {"ttft": LatencyHistogram.of((0.1, 1.0), [(number, 0.5)])}


def test_latencies_of_a_pool_count_each_request_once():
    """Requests of a missed scrape count at the next one, and those before it not again."""
    a, b = target("a"), target("b")

    def scraped(at: float, who: ScrapeTarget, number: float) -> ScrapeResult:
        return ScrapeResult(who, at, 0.01, replace(page_of(), histograms=latencies(number)))

    windows = rounds_of(
        [scraped(0.0, a, 3), scraped(0.0, b, 100)],
        [scraped(5.0, a, 4), scraped(5.0, b, 110)],
        [bad(10.0, a), scraped(10.0, b, 111)],
        [scraped(15.0, a, 9), scraped(15.0, b, 5)],  # b was started again
        [scraped(20.0, a, 9), scraped(20.0, b, 6)],
    )

    rounds = windows.pools()[PREFILL]

    assert [sum(each.count for each in one.latencies.values()) for one in rounds] == [
        0,
        11,
        1,
        5,
        1,
    ]


def test_latencies_of_each_workload_are_kept_apart_too():
    old, new = (replace(target(pod), workload=pod[0]) for pod in ("a-0", "b-0"))

    def scraped(at: float, who: ScrapeTarget, number: float) -> ScrapeResult:
        return ScrapeResult(who, at, 0.01, replace(page_of(), histograms=latencies(number)))

    windows = rounds_of(
        [scraped(0.0, old, 1), scraped(0.0, new, 1)],
        [scraped(5.0, old, 4), scraped(5.0, new, 9)],
        [scraped(10.0, new, 10)],
    )

    _, both, alone = windows.pools()[PREFILL]
    found = {name: each["ttft"].count for name, each in both.by_workload.items()}
    assert found == {"a": 3, "b": 8}
    assert both.latencies["ttft"].count == 11
    assert alone.by_workload["b"] is alone.latencies
