"""Many steps at once are the same as single steps: by a copy of the engine that plans each one."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_simulator.engine import SimulatedEngine
from pdcluster_simulator.events import OwnMachine, SharedMachine, SimulatedTime
from pdcluster_simulator.requests import EngineWork, SimulatedRequest
from pdcluster_simulator.step_model import StepModel
from pdcluster_worker.messages.engine_settings import EngineSettings, SchedulerSettings
from tests.simulator.small_clusters import TimedRequest, apart, make_times

SCHEDULERS = ("continuous", "sarathi", "prefill-first", "orca", "request-level", "simple-chunking")


@dataclass
class Log:
    """Takes an engine's events, and notes them with their time."""

    queue: SimulatedTime
    firsts: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    num_gaps: int = 0
    gap_seconds: float = 0.0

    def on_token(self, request: EngineWork) -> None:
        self.firsts[request.request_id] = self.queue.now

    def on_gaps(self, seconds: float, number: int) -> None:
        self.num_gaps += number
        self.gap_seconds += number * seconds

    def on_end(self, request: EngineWork) -> None:
        assert request.request_id not in self.ends
        assert request.num_output_tokens == request.sampling.max_tokens
        self.ends[request.request_id] = self.queue.now

    def on_computed(self, request: EngineWork, num_tokens: int) -> None:
        raise AssertionError("no prompt is for a peer")

    def on_failed(self, request: EngineWork, reason: str) -> None:
        raise AssertionError(reason)

    def on_freed(self) -> None: ...


class SteppedEngine(SimulatedEngine):
    """Its scheduler plans every step."""

    def _begin(self) -> None:
        if self.scheduler.num_requests:
            self._schedule()


def run_engine(
    cls: type[SimulatedEngine],
    arrivals: list[TimedRequest],
    scheduler: str = "continuous",
    times: StepModel | None = None,
    num_blocks: int = 24,
) -> tuple[Log, SimulatedEngine]:
    queue = SimulatedTime()
    log = Log(queue)
    sizes = EngineSettings(
        block_size=4,
        num_blocks=num_blocks,
        max_batched_tokens=128 if scheduler != "continuous" else 16,
        max_sequences=6,
        max_model_len=90,
        prefix_caching=False,
        scheduler=SchedulerSettings(name=scheduler),  # type: ignore[arg-type]
    )
    engine = cls(queue, OwnMachine(queue), sizes, times or make_times(), log)

    def arrive(number: int) -> None:
        at, prompt, output = arrivals[number]
        work = EngineWork.of(SimulatedRequest(number, at, prompt, output, 0, (), str(number)), at)
        engine.post(lambda: engine.submit(work))

    for number, (at, _, _) in enumerate(arrivals):
        queue.at(at, arrive, number)
    queue.run(1000.0)
    return log, engine


arrival_lists = st.lists(
    st.tuples(st.integers(0, 6000), st.integers(1, 40), st.integers(1, 40)),
    min_size=1,
    max_size=12,
).map(apart)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=40, deadline=None)
@given(arrivals=arrival_lists)
def test_many_steps_at_once_end_as_single_steps_do(scheduler: str, arrivals: list[TimedRequest]):
    quick, engine = run_engine(SimulatedEngine, arrivals, scheduler)
    slow, stepped = run_engine(SteppedEngine, arrivals, scheduler)

    assert quick.ends.keys() == slow.ends.keys() == {str(n) for n in range(len(arrivals))}
    for name, end in slow.ends.items():
        assert quick.ends[name] == pytest.approx(end, abs=1e-6)
        assert quick.firsts[name] == pytest.approx(slow.firsts[name], abs=1e-6)
    assert quick.num_gaps == slow.num_gaps == sum(output - 1 for _, _, output in arrivals)
    assert quick.gap_seconds == pytest.approx(slow.gap_seconds)
    assert engine.totals.num_steps == stepped.totals.num_steps
    assert engine.pool.num_available == stepped.pool.num_available == 24
    assert engine.scheduler.num_preemptions == stepped.scheduler.num_preemptions


def test_gaps_add_up_to_the_time_between_first_and_last_token():
    log, _ = run_engine(SimulatedEngine, [(0.0, 30, 20), (0.05, 9, 30), (0.2, 40, 5)])

    assert log.gap_seconds == pytest.approx(
        sum(log.ends[name] - log.firsts[name] for name in log.ends)
    )


def test_a_step_of_one_decode_takes_the_seconds_of_the_model():
    log, _ = run_engine(SimulatedEngine, [(0.0, 1, 11)])

    assert log.firsts["0"] == pytest.approx(0.0101)
    assert log.ends["0"] == pytest.approx(11 * 0.0101)


def test_engines_of_one_machine_slow_each_other_down():
    queue = SimulatedTime()
    machine, ends = SharedMachine(queue, (1.0, 0.5)), list[float]()
    machine.start(2.0, lambda: ends.append(queue.now))
    queue.at(1.0, lambda _: machine.start(3.0, lambda: ends.append(queue.now)))
    queue.run(100.0)

    # Alone for a second, both for two, and the rest of the second alone.
    assert ends == pytest.approx([3.0, 5.0])


def test_a_work_that_is_cut_ends_earlier():
    for machine_of in (OwnMachine, lambda queue: SharedMachine(queue, (1.0,))):
        queue = SimulatedTime()
        ends = list[float]()
        machine = machine_of(queue)
        work = machine.start(10.0, lambda ends=ends, queue=queue: ends.append(queue.now))
        queue.at(3.0, lambda _, m=machine, w=work: m.cut(w, 4.0))
        queue.run(100.0)
        assert ends == pytest.approx([4.0])
