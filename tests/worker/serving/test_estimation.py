"""Learning from requests that run here, and the refusal of deadlines that cannot be met."""

from contextlib import ExitStack

import pytest
from msgspec.structs import replace

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import EarlyRejectionSpec, EstimationSpec
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.qos.load_shedding import aged
from pdcluster_worker.serving.estimation import MAX_LABELS, Estimation, TrackedRequest
from pdcluster_worker.tracing import request_trace
from tests.worker.serving.doubles import dispatcher_of
from tests.worker.serving.ingress.ingresses import two_tokens


class Bench:
    """An estimation on a clock that tests move."""

    def __init__(self, policy: EstimationSpec) -> None:
        self.now = 100.0
        self.policy = policy
        self.metrics = Metrics()
        self.estimation = Estimation(self.metrics, lambda: self.policy, lambda: self.now)
        self.estimation.slots = lambda: 2

    def feed(
        self, tracked: TrackedRequest, count: int, token_seconds: float, *, is_last: bool = True
    ) -> None:
        for number in range(count):
            self.now += token_seconds
            reason = "stop" if is_last and number == count - 1 else None
            tracked.token(
                Token("r", 1, finish_reason=reason, prefill_seconds=None if number else 0.5)
            )

    def serve(
        self, *, count: int = 101, token_seconds: float = 0.01, deadline: float | None = None
    ) -> None:
        with self.estimation.tracking(spec(deadline)) as tracked:
            self.feed(tracked, count, token_seconds)

    def completion(self) -> float | None:
        estimator, estimation = self.estimation.estimator, self.estimation
        if estimator is None:
            return None
        request = estimation.request_of(spec())
        return estimator.estimated_completion_seconds(request, estimation.queue)

    def ttft(self) -> float | None:
        estimator, estimation = self.estimation.estimator, self.estimation
        if estimator is None:
            return None
        return estimator.estimated_ttft_seconds(estimation.request_of(spec()), estimation.queue)

    def mape(self, quantity: str, group: str) -> tuple[float, float]:
        labels = {"quantity": quantity, "group": group}
        value = self.metrics.registry.get_sample_value
        count = value("pdcluster_estimate_error_ratio_count", labels) or 0.0
        return (value("pdcluster_estimate_error_ratio_sum", labels) or 0.0) / max(1.0, count), count


def spec(deadline: float | None = None, max_tokens: int = 101) -> RequestSpec:
    return RequestSpec(
        "r", [1] * 50, SamplingParams(max_tokens=max_tokens, seed=1), deadline_seconds=deadline
    )


@pytest.mark.parametrize("name", ["rwt", "loadAware"])
def test_estimates_come_from_completions_of_this_worker(name):
    bench = Bench(EstimationSpec(estimator=name))
    for _ in range(5):
        assert bench.completion() is None
        bench.serve()

    assert bench.completion() == pytest.approx(1.5, rel=0.02)  # 0.5 s of prefill
    assert bench.ttft() == pytest.approx(0.51, rel=0.02)


def test_the_default_estimates_nothing_here():
    bench = Bench(EstimationSpec())
    for _ in range(9):
        bench.serve()

    assert bench.estimation.estimator is None
    assert bench.completion() is None
    assert bench.ttft() is None


def test_a_preset_is_gone_by_at_once_and_another_policy_starts_over():
    bench = Bench(EstimationSpec(estimator="rwt", preset_token_milliseconds=20.0))
    assert bench.completion() == pytest.approx(101 * 0.02)
    for _ in range(5):
        bench.serve()
    bench.policy = EstimationSpec(estimator="loadAware")

    assert bench.completion() is None


def test_what_was_measured_outlives_a_policy_with_the_same_estimator():
    bench = Bench(EstimationSpec(estimator="loadAware"))
    for _ in range(5):
        bench.serve()
    bench.policy = bench.policy.model_copy(
        update={"allow_client_deadline": True, "reject_unmeetable": True}
    )

    assert bench.completion() is not None


def test_requests_that_decode_together_are_one_batch():
    """Two at a time take twice as long; one that comes when nothing runs is alone."""
    bench = Bench(EstimationSpec(estimator="loadAware"))
    for _ in range(5):
        bench.serve(token_seconds=0.01)
        with ExitStack() as stack:
            first, second = (
                stack.enter_context(bench.estimation.tracking(spec())) for _ in range(2)
            )
            for number in range(101):
                bench.now += 0.02
                for tracked in (first, second):
                    tracked.token(Token("r", 1, finish_reason="stop" if number == 100 else None))
    alone = bench.completion()
    with bench.estimation.tracking(spec()) as other:
        other.token(Token("o", 1))
        beside = bench.completion()

    assert (alone or 0) - 0.5 == pytest.approx(1.0, rel=0.1)
    assert (beside or 0) - 0.5 == pytest.approx(2.0, rel=0.1)


def test_a_request_that_was_cut_short_teaches_nothing():
    bench = Bench(EstimationSpec(estimator="rwt"))
    for _ in range(9):
        with bench.estimation.tracking(spec()) as tracked:
            bench.feed(tracked, 60, 0.01, is_last=False)

    assert bench.completion() is None


def test_the_error_of_estimates_is_exported_by_group():
    bench = Bench(
        EstimationSpec(
            estimator="rwt", preset_token_milliseconds=20.0, slo_granularity_seconds=10.0
        )
    )
    bench.serve(token_seconds=0.01, deadline=25.0)

    assert bench.mape("completion", "20s") == (pytest.approx(1.0), 1)  # 2.02 s for 1.01 s
    assert bench.mape("ttft", "20s") == (pytest.approx(1.0), 1)
    assert bench.mape("completion", "none") == (0.0, 0)


@pytest.mark.parametrize(("waited", "group"), [(0.0, "200s"), (0.01, "200s"), (50.0, "100s")])
def test_the_way_to_a_worker_takes_no_request_out_of_its_group(waited, group):
    bench = Bench(EstimationSpec(slo_granularity_seconds=100.0))

    assert bench.estimation.request_of(aged(spec(deadline=200.0), waited)).group == group


def test_group_labels_of_the_error_are_bounded():
    bench = Bench(
        EstimationSpec(estimator="rwt", preset_token_milliseconds=20.0, slo_granularity_seconds=1.0)
    )
    for deadline in range(1, 40):
        bench.serve(count=2, deadline=float(deadline))
    groups = {
        s.labels["group"]
        for m in bench.metrics.registry.collect()
        for s in m.samples
        if s.name.startswith("pdcluster_estimate")
    }

    assert len(groups) == MAX_LABELS + 1
    assert "other" in groups


def test_an_estimate_beyond_the_deadline_is_refused_with_the_estimate():
    policy = EstimationSpec(estimator="rwt", preset_token_milliseconds=20.0, reject_unmeetable=True)
    bench = Bench(policy)
    with pytest.raises(RequestError) as refused, bench.estimation.tracking(spec(deadline=0.5)):
        pass

    assert (refused.value.status, refused.value.code, refused.value.retry_after_seconds) == (
        503,
        "deadline_unmeetable",
        2,
    )
    assert (
        "complete in about 2.0 s, after the deadline of 0.5 s: allow more time"
        in refused.value.message
    )
    with bench.estimation.tracking(spec(deadline=3.0)), bench.estimation.tracking(spec()):
        pass
    bench.policy = policy.model_copy(update={"reject_unmeetable": False})
    with bench.estimation.tracking(spec(deadline=0.5)):
        pass


def test_only_a_request_that_has_begun_elsewhere_is_not_refused_and_none_refused_is_in_the_queue():
    bench = Bench(
        EstimationSpec(estimator="rwt", preset_token_milliseconds=20.0, reject_unmeetable=True)
    )
    before = bench.ttft()
    with bench.estimation.tracking(replace(spec(deadline=0.5), output=[7])):
        pass
    for _ in range(9):
        with pytest.raises(RequestError), bench.estimation.tracking(spec(deadline=0.5)):
            pass

    assert bench.ttft() == before


async def test_a_decode_worker_follows_its_requests_and_refuses_before_any_work(worker, engine):
    engine.answer = two_tokens
    estimation = EstimationSpec(
        estimator="loadAware", preset_token_milliseconds=5.0, reject_unmeetable=True
    )
    worker.policy = PolicyConfig().model_copy(update={"estimation": estimation})
    local = dispatcher_of(worker)
    with request_trace.begin_trace("r") as way:
        assert [g.token.token_id async for g in local.run(spec(), "auto")] == [7, 8]
    requested = len(engine.inputs)
    with pytest.raises(RequestError, match="deadline of 1e-06 s"):
        [g async for g in local.run(spec(deadline=1e-6), "auto")]

    assert len(engine.inputs) == requested
    assert next(event.facts["group"] for event in way.events if event.name == "estimate") == "none"
    assert worker.metrics.registry.get_sample_value(
        "pdcluster_estimate_error_ratio_count", {"quantity": "completion", "group": "none"}
    )


async def test_the_estimator_of_the_policy_feeds_early_rejection(worker, engine):
    estimation = EstimationSpec(estimator="rwt", preset_token_milliseconds=60_000.0)
    worker.policy = PolicyConfig().model_copy(
        update={"estimation": estimation, "early_rejection": EarlyRejectionSpec(enabled=True)}
    )
    local = dispatcher_of(worker)
    low = replace(spec(), priority=100)

    with pytest.raises(RequestError, match=r"the first token would take about 60.0 s") as refused:
        local.admit([low])
    assert refused.value.status == 429
    worker.policy = worker.policy.model_copy(update={"estimation": EstimationSpec()})
    local.admit([low])
