"""Our own estimator and its parts: lengths with running ones censored, d by batch, the queue played
forward.
"""

from dataclasses import replace
from math import inf

import pytest

from pdcluster_worker.routing.waiting_time.lengths import Survival, simulate_queue
from pdcluster_worker.routing.waiting_time.load_aware import LoadAware
from pdcluster_worker.routing.waiting_time.rates import PrefillRate, Presets, StepTime
from pdcluster_worker.routing.waiting_time.request_queue import (
    Completion,
    Estimator,
    QueuedRequest,
    QueueState,
    RequestQueue,
)
from pdcluster_worker.routing.waiting_time.rwt import RwtEstimator


def request(
    tokens: int = 0, *, prompt: int = 0, group: str = "g", priority: int = 0, due: float = inf
) -> QueuedRequest:
    return QueuedRequest(
        group, prompt, max_tokens=1000, priority=priority, due_seconds=due, num_tokens=tokens
    )


def state(slots: int, *requests: QueuedRequest) -> QueueState:
    return QueueState(RequestQueue(requests), slots)


def ended(
    tokens: int = 100, seconds: float = 1.0, batch: float = 1.0, prefill: float | None = None
) -> Completion:
    return Completion("g", 200, tokens, prefill, seconds, batch)


def test_survival_of_ended_answers_is_their_distribution() -> None:
    lengths = Survival.of([(10, 1.0), (20, 1.0), (30, 1.0), (40, 1.0)])

    assert lengths.mean == pytest.approx(25)
    assert lengths.mean_beyond(10) == pytest.approx(20)
    assert lengths.mean_beyond(35) == pytest.approx(5)
    assert [lengths.quantile_beyond(0, rank) for rank in (0.0, 0.3, 0.6, 0.99)] == [10, 20, 30, 40]
    assert lengths.quantile_beyond(25, 0.4) == 5
    assert lengths.quantile_beyond(25, 0.6) == 15


def test_survival_counts_running_answers_as_at_least_so_long() -> None:
    """Two short ones have ended while two go on at 50: half of the answers are longer than 50,
    which the mean of those ended denies.
    """
    lengths = Survival.of([(10, 1.0), (10, 1.0), (100, 0.5)], [(50, 1.0), (50, 1.0)])

    assert lengths.mean == pytest.approx(10 * 2 / 4.5 + 100 * 2.5 / 4.5)


def test_survival_of_a_bimodal_group_knows_the_mode_of_a_running_answer() -> None:
    lengths = Survival.of([(100, 5.0), (5000, 5.0)])

    assert lengths.mean == 2550
    assert lengths.mean_beyond(101) == 4899


def test_survival_beyond_all_that_was_seen_goes_on_for_a_share() -> None:
    assert Survival.of([(10, 1.0)]).mean_beyond(100) == 50
    assert Survival.of([(10, 1.0)]).quantile_beyond(100, 0.3) == 50
    with pytest.raises(ValueError, match="no answer has ended"):
        Survival.of([], [(3, 1.0)])


def test_step_time_is_a_line_over_batches() -> None:
    step = StepTime(None, 5)
    for batch in (1, 2, 4, 8, 16):
        assert step.seconds(1) is None
        step.observe(99 * (0.01 + 0.001 * batch), 100, batch)

    assert [step.seconds(batch) for batch in (1, 10)] == [pytest.approx(0.011), pytest.approx(0.02)]


def test_step_time_without_different_batches_is_flat_and_follows_what_is_new() -> None:
    step = StepTime(0.5, 5)
    assert step.seconds(3) == 0.5
    for _ in range(10):
        step.observe(99 * 0.01, 100, 4)
    assert step.seconds(1) == step.seconds(8) == pytest.approx(0.01)
    for _ in range(100):
        step.observe(99 * 0.02, 100, 4)

    assert step.seconds(1) == pytest.approx(0.02, rel=0.05)


def test_step_time_stays_above_nothing_for_small_batches() -> None:
    step = StepTime(None, 2)
    step.observe(99 * 0.001, 100, 10)
    step.observe(99 * 0.1, 100, 20)

    assert (step.seconds(1) or 0) > 0
    step.observe(5.0, 1, 4)  # one token has no gap
    assert step.seconds(20) == pytest.approx(0.1)


def test_prefill_rate_is_measured_tokens_over_seconds() -> None:
    rate = PrefillRate(None)
    assert rate.seconds(100) == 0.0
    assert PrefillRate(50.0).seconds(100) == 2.0
    rate.observe(1000, 0.5)
    rate.observe(1000, None)
    rate.observe(0, 3.0)

    assert rate.seconds(100) == pytest.approx(0.05)


def test_drain_gives_free_seats_to_those_that_wait() -> None:
    assert simulate_queue([], [10.0, 10.0, 10.0], 1, lambda _: 1.0) == [(0, 10), (10, 20), (20, 30)]
    assert simulate_queue([10.0, 30.0], [5.0], 2, lambda _: 1.0) == [(0, 10), (0, 30), (10, 15)]
    assert simulate_queue([], [], 4, lambda _: 1.0) == []


def test_the_line_goes_by_priority_then_deadline_then_arrival() -> None:
    kinds = [{"priority": 1}, {"due": 9.0}, {}, {"due": 3.0}, {"tokens": 5}, {"priority": -1}]
    queue = RequestQueue(request(prompt=10**index, **kind) for index, kind in enumerate(kinds))
    urgent, plain = queue.ahead(request(due=5.0)), queue.ahead(request())

    assert (urgent.num_requests, urgent.prompt_tokens) == (2, 101_000)
    assert (plain.num_requests, plain.prompt_tokens) == (4, 101_110)
    assert len(queue.running) == 1


@pytest.mark.parametrize("due", [0.0, 3.0, 7.0, inf])
def test_the_line_ahead_is_that_of_a_new_line_after_some_have_left(due: float) -> None:
    line = [request(prompt=10**at, group=f"{at % 2}", due=float(at)) for at in range(8)]
    queue = RequestQueue(line)
    queue.began(line[1])
    for at in (1, 6, 0):
        queue.remove(line[at])

    assert queue.ahead(request(due=due)) == RequestQueue(queue).ahead(request(due=due))
    assert queue.ahead(request()).prompt_tokens == 10_111_100
    assert len(queue) == 5


def test_a_group_is_forgotten_with_its_last_request() -> None:
    queue, only = RequestQueue(), request(group="86400s")
    queue.add(only)
    queue.remove(only)

    assert list(queue.by_group) == []


def test_estimate_of_a_long_line_is_that_of_the_line_played_forward() -> None:
    estimator = LoadAware(Presets(token_seconds=0.01, output_tokens=100))
    for tokens in (80, 100, 120) * 10:
        estimator.observe(ended(tokens, tokens * 0.01))
    going = [request(tokens) for tokens in range(1, 80, 10)]
    queue = state(8, *going, *(request() for _ in range(100)))
    exact = simulate_queue(
        [100.0 - tokens for tokens in range(1, 80, 10)], [100.0] * 101, 8, lambda _: 0.01
    )[-1]

    assert estimator.estimated_completion_seconds(request(), queue) == pytest.approx(
        exact[1], rel=0.03
    )


@pytest.mark.parametrize("estimator", [LoadAware(Presets()), RwtEstimator(Presets())])
def test_without_presets_nothing_is_estimated_before_five_completions(estimator: Estimator) -> None:
    for _ in range(4):
        estimator.observe(ended())
        assert estimator.estimated_ttft_seconds(request(), state(4)) is None
        assert estimator.estimated_completion_seconds(request(), state(4)) is None
    estimator.observe(ended())

    assert estimator.estimated_ttft_seconds(request(), state(4)) == pytest.approx(0.01, rel=0.02)


def test_load_aware_waits_for_a_seat_and_for_prefills_before_it() -> None:
    estimator = LoadAware(
        Presets(token_seconds=0.01, output_tokens=100, prefill_tokens_per_second=1000)
    )
    free = estimator.estimated_ttft_seconds(request(prompt=500), state(2))
    behind = estimator.estimated_ttft_seconds(request(prompt=500), state(2, request(prompt=1500)))
    full = estimator.estimated_ttft_seconds(request(prompt=500), state(2, request(40), request(20)))

    assert (free, behind) == (pytest.approx(0.51), pytest.approx(2.01))
    assert full == pytest.approx(0.6 + 0.51, abs=0.4)
    assert estimator.estimated_completion_seconds(request(prompt=500), state(2)) == pytest.approx(
        1.5
    )


def test_load_aware_takes_the_batch_into_account() -> None:
    estimator = LoadAware(Presets())
    for batch in (1, 2, 4, 8) * 5:
        estimator.observe(ended(101, 1.0 + 0.5 * batch, batch))
    alone = estimator.estimated_completion_seconds(request(), state(8))
    beside = estimator.estimated_completion_seconds(
        request(), state(8, *(request(1) for _ in range(7)))
    )

    assert alone == pytest.approx(1.5, rel=0.05)
    assert beside == pytest.approx(5.0, rel=0.05)


def test_load_aware_group_ends_with_the_last_of_its_members() -> None:
    estimator = LoadAware(Presets(token_seconds=0.01, output_tokens=100))
    for _ in range(20):
        estimator.observe(ended(100, 0.99))

    def seconds(*members: QueuedRequest) -> tuple[float, float]:
        found = estimator.group_seconds(members, 2)
        assert found is not None
        return found

    assert seconds(*(request() for _ in range(4))) == pytest.approx((2.0, 2.0), rel=0.02)
    assert seconds(*(request() for _ in range(3))) == pytest.approx((2.0, 1.5), rel=0.02)
    assert seconds(request(60), request()) == pytest.approx((1.0, 0.7), rel=0.02)
    # more of them have begun than there are slots: one was evicted
    assert seconds(*(request(50) for _ in range(3))) == pytest.approx((1.0, 0.75), rel=0.02)


def test_a_long_group_takes_as_long_as_if_all_of_it_were_simulated() -> None:
    estimator = LoadAware(Presets(token_seconds=0.01, output_tokens=100))
    for number in range(40):
        estimator.observe(ended((50, 150)[number % 2], 0.01 * ((50, 150)[number % 2] - 1)))
    found = estimator.group_seconds([request() for _ in range(2000)], 4)

    assert found is not None
    assert found.work == pytest.approx(2000 / 4 * 1.0, rel=0.02)
    assert found.work <= found.total <= 1.02 * found.work


@pytest.mark.parametrize("estimator", [RwtEstimator(Presets()), LoadAware(Presets())])
def test_nothing_is_forecast_before_it_was_measured(estimator: Estimator) -> None:
    assert estimator.group_seconds([request()], 2) is None


@pytest.mark.parametrize(
    "estimator",
    [RwtEstimator(Presets(token_seconds=0.01)), LoadAware(Presets(token_seconds=0.01))],
)
def test_an_evicted_answer_teaches_its_length_and_no_time(estimator: Estimator) -> None:
    for _ in range(20):
        estimator.observe(replace(ended(1000), decode_seconds=None))
    found = estimator.group_seconds([request()] * 9, 1)

    assert found is not None
    assert found.work == pytest.approx(9 * 1000 * 0.01, rel=0.02)


def test_rwt_of_a_group_is_t_of_n_with_what_was_observed() -> None:
    presets = Presets(token_seconds=0.02, output_tokens=50)
    static = RwtEstimator(presets, adapts_decode=False, adapts_output=False)
    decode = RwtEstimator(presets, adapts_output=False)
    both = RwtEstimator(presets)
    for estimator in (static, decode, both):
        for _ in range(60):
            estimator.observe(ended(100, 1.0))

    def seconds(estimator: RwtEstimator) -> float:
        found = estimator.group_seconds([request() for _ in range(5)], 1)
        assert found is not None
        assert found.work == found.total
        return found.total

    assert seconds(static) == pytest.approx(4 * 50 * 0.02 + 1000 * 0.02)
    assert seconds(decode) == pytest.approx(4 * 50 * 0.01 + 1000 * 0.01, rel=0.01)
    assert seconds(both) == pytest.approx(4 * 100 * 0.01 + 1000 * 0.01, rel=0.01)


def test_rwt_of_one_request_is_conservative() -> None:
    """[R6]: above what the same line takes with answers of their mean length."""
    presets = Presets(token_seconds=0.01, output_tokens=100)
    rwt, ours = RwtEstimator(presets), LoadAware(presets)
    queue = state(2, *(request(1) for _ in range(2)))

    assert (rwt.estimated_completion_seconds(request(), queue) or 0) > (
        ours.estimated_completion_seconds(request(), queue) or inf
    )
    assert rwt.estimated_ttft_seconds(request(), state(2)) == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [((100, 900), (110, 890), 500.0), ((890, 910), (95, 105), 100.0)],
    ids=["alike", "different"],
)
def test_groups_learn_from_each_other_as_far_as_they_are_alike(
    old: tuple[int, int], new: tuple[int, int], expected: float
) -> None:
    estimator = LoadAware(Presets())
    for number in range(40):
        estimator.observe(replace(ended(old[number % 2]), group="old"))
    for number in (0, 0, 0, 1):
        estimator.observe(replace(ended(new[number]), group="new"))

    assert estimator.survival("new").mean == pytest.approx(expected, rel=0.25)
