"""Request groups of a worker: their forecasts, deferrals, and the messages to its engines."""

from collections.abc import Sequence
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import EstimationSpec
from pdcluster_worker.messages.engine import DeferGroups, Submit
from pdcluster_worker.messages.requests import UNDATED_SECONDS, RequestSpec, SamplingParams, Token
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.waiting_time.load_aware import LoadAware
from pdcluster_worker.routing.waiting_time.rates import Presets
from pdcluster_worker.routing.waiting_time.request_queue import GroupSeconds, QueuedRequest
from pdcluster_worker.serving.estimation import Estimation, TrackedRequest
from pdcluster_worker.serving.group_order import MAX_PLANNED, PLAN_SECONDS, PLAN_SHARE, GroupOrder
from tests.worker.serving.doubles import dispatcher_of
from tests.worker.serving.ingress.ingresses import two_tokens

EVICT = EstimationSpec(
    estimator="loadAware",
    allow_client_deadline=True,
    late_groups="Evict",
    slo_granularity_seconds=1.0,
    preset_token_milliseconds=100.0,
    preset_output_tokens=10,
)
"""An answer takes a second, before anything was measured."""


class Client:
    def __init__(self) -> None:
        self.problem: str | None = None
        self.messages: list[DeferGroups] = []

    def send(self, message: DeferGroups) -> None:
        self.messages.append(message)


class Bench:
    """One slot, on a clock that tests move."""

    def __init__(self, policy: EstimationSpec = EVICT) -> None:
        self.now = 100.0
        self.policy = policy
        self.metrics = Metrics()
        self.clients = [Client()]
        self.estimation = Estimation(self.metrics, lambda: self.policy, lambda: self.now)
        self.order = GroupOrder(
            self.estimation, self.metrics, lambda: self.policy, lambda: self.clients
        )
        self.estimation.on_change = self.order.update
        self.open: dict[TrackedRequest, ExitStack] = {}

    def come(self, deadline: float | None, count: int = 1, priority: int = 0) -> TrackedRequest:
        """The last of them."""
        for _ in range(count):
            stack = ExitStack()
            sampling = SamplingParams(max_tokens=50, seed=1)
            spec = RequestSpec("r", [1], sampling, priority=priority, deadline_seconds=deadline)
            tracked = stack.enter_context(self.estimation.tracking(spec))
            self.open[tracked] = stack
        return tracked

    def end(self, tracked: TrackedRequest, num_tokens: int = 10) -> None:
        for number in range(num_tokens):
            tracked.token(Token("r", 1, finish_reason="stop" if number == num_tokens - 1 else None))
        self.open.pop(tracked).close()

    def plan(self) -> frozenset[str]:
        self.now += PLAN_SECONDS
        self.order.update()
        return self.order.deferred

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def test_a_group_that_makes_others_late_is_deferred_and_the_engine_is_sent_that_once() -> None:
    bench = Bench()
    long = bench.come(6.0, count=6).request
    bench.plan()
    assert bench.clients[0].messages == []
    bench.come(7.0, count=4)
    bench.plan()

    assert bench.plan() == {long.due_group}
    assert bench.clients[0].messages == [DeferGroups([long.due_group], evicts=True)]
    assert bench.value("pdcluster_deferred_groups_total") == 1


def test_groups_are_deferred_no_more_when_the_policy_says_so() -> None:
    bench = Bench()
    bench.come(6.0, count=6)
    bench.come(7.0, count=4)
    bench.plan()
    bench.policy = EVICT.model_copy(update={"late_groups": "Keep"})

    assert bench.plan() == frozenset()
    assert bench.clients[0].messages[-1] == DeferGroups([], evicts=False)


def test_an_engine_that_was_started_again_is_sent_it_again_and_one_that_is_gone_does_not() -> None:
    bench = Bench()
    bench.come(6.0, count=6)
    bench.come(7.0, count=4)
    bench.plan()
    gone = Client()
    gone.problem = "it died"
    bench.clients = [Client(), gone]
    bench.plan()

    assert len(bench.clients[0].messages) == 1
    assert gone.messages == []
    gone.problem = None  # it had only stalled
    bench.plan()
    assert gone.messages == bench.clients[0].messages


def test_requests_with_a_deadline_go_before_those_without() -> None:
    bench = Bench()
    bench.now = 40.0  # from here on those without a deadline are due a minute later
    undated = bench.come(None, count=50).request
    bench.now = 40.0 + UNDATED_SECONDS - 20
    bench.come(22.0, count=4)

    assert bench.plan() == {undated.due_group}


def test_nothing_is_planned_before_it_can_be_forecast() -> None:
    bench = Bench(EVICT.model_copy(update={"preset_token_milliseconds": None}))
    bench.come(1.0, count=9)

    assert bench.plan() == frozenset()
    assert bench.value("pdcluster_estimate_error_ratio_count", quantity="group", group="1s") == 0


def test_the_error_of_the_forecast_that_decides_is_exported() -> None:
    """Made when the last of the group came: 2 s for what takes 1.25."""
    bench = Bench()
    first, second = bench.come(30.0), bench.come(30.0)
    bench.plan()
    bench.now += 1.0
    bench.end(first)
    bench.now += 0.25
    bench.end(second)

    labels = {"quantity": "group", "group": "30s"}
    assert bench.value("pdcluster_estimate_error_ratio_count", **labels) == 1
    assert bench.value("pdcluster_estimate_error_ratio_sum", **labels) == pytest.approx(0.6)


def test_an_evicted_request_teaches_no_time() -> None:
    bench = Bench()
    long = bench.come(6.0, count=6)
    bench.come(7.0, count=4)
    bench.plan()
    long.token(Token("r", 1))
    long.token(Token("r", 1, finish_reason="stop"))
    completion = long.completion()

    assert completion is not None
    assert completion.decode_seconds is None
    assert completion.output_tokens == 2


def test_estimates_of_new_requests_count_with_the_order() -> None:
    """Those of a deferred group are not before a request that comes."""
    bench = Bench()
    bench.come(6.0, count=6)
    bench.come(7.0, count=4)
    before = bench.estimation.queue.requests.ahead(bench.estimation.request_of(_spec(8.0)))
    bench.plan()
    after = bench.estimation.queue.requests.ahead(bench.estimation.request_of(_spec(8.0)))

    assert (before.num_requests, after.num_requests) == (10, 4)


def _spec(deadline: float) -> RequestSpec:
    return RequestSpec("n", [1], SamplingParams(max_tokens=9, seed=1), deadline_seconds=deadline)


async def test_requests_carry_their_group_to_the_engine_where_groups_may_be_deferred(
    worker, engine
) -> None:
    engine.answer = two_tokens
    local = dispatcher_of(worker)
    groups = []
    for policy in (EstimationSpec(), EVICT):
        worker.policy = PolicyConfig().model_copy(update={"estimation": policy})
        request = replace(_spec(8.0), request_id=policy.late_groups)
        assert [g.token.token_id async for g in local.run(request, "auto")] == [7, 8]
        groups += [each.spec.group for each in engine.inputs if isinstance(each, Submit)][-1:]

    assert groups[0] == ""
    assert groups[1].startswith("0/8s@")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([None, 2.0, 5.0, 20.0]), st.integers(1, 5), st.floats(0.0, 4.0)),
        min_size=1,
        max_size=40,
    )
)
def test_no_request_is_deferred_for_longer_than_its_deadline_was(
    arrivals: list[tuple[float | None, int, float]],
) -> None:
    """Whatever comes after it.  No request ends here: the worker is as overloaded as can be."""
    bench = Bench()
    for deadline, count, pause in arrivals:
        bench.come(deadline, count)
        bench.now += pause
        deferred = bench.plan()
        for tracked in bench.open:
            request = tracked.request
            patience = UNDATED_SECONDS if request.slo_seconds is None else request.slo_seconds
            if bench.now >= request.due_seconds + patience:
                assert request.due_group not in deferred


class SlowEstimator(LoadAware):
    """A forecast of it takes a tenth of a second."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(Presets(token_seconds=0.1, output_tokens=10))
        self.bench, self.num_forecasts = bench, 0

    def group_seconds(self, members: Sequence[QueuedRequest], slots: int) -> GroupSeconds | None:
        self.num_forecasts += 1
        self.bench.now += 0.1
        return super().group_seconds(members, slots)


def test_plans_take_a_small_share_of_the_time() -> None:
    bench = Bench()
    assert bench.estimation.estimator is not None
    slow = bench.estimation._estimator = SlowEstimator(bench)
    start = bench.now
    for _ in range(100):
        bench.come(None)
        bench.now += 0.2

    assert slow.num_forecasts * 0.1 <= 1.5 * PLAN_SHARE * (bench.now - start)


def test_a_plan_forecasts_the_first_groups_by_priority_and_deadline_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, forecast = Bench(), list[QueuedRequest]()
    first = [bench.come(1000.0 + 10 * number, priority=-1) for number in range(2)]
    rest = [bench.come(1000.0 - 10 * number) for number in range(2 * MAX_PLANNED)]

    def group_seconds(
        estimator: LoadAware, members: Sequence[QueuedRequest], slots: int
    ) -> GroupSeconds:
        forecast.extend(members)
        return GroupSeconds(1.0, 1.0)

    monkeypatch.setattr(LoadAware, "group_seconds", group_seconds)
    bench.plan()

    earliest = [*first, *rest[: -MAX_PLANNED + 1 : -1]]
    assert forecast == [tracked.request for tracked in earliest]
