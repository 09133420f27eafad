"""A simulated prefill and decode worker beside two real engine cores under a clock of the test.

The cores are the workers' own, with a runner whose steps take the seconds of the same model, and a
network that delivers blocks when a step has ended.  Times must be equal, step for step.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdcluster_simulator.events import SimulatedTime
from pdcluster_simulator.simulated_step import work_of
from pdcluster_simulator.step_model import StepModel
from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.engine.request import Batch
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token, TransferTarget
from tests.simulator.small_clusters import (
    TimedRequest,
    apart,
    make_cluster,
    make_model,
    make_times,
    make_trace,
    run,
)
from tests.worker.fake_network import FakeNetwork, FakeTransport
from tests.worker.fake_runner import FakeRunner

HOP, TRANSFER = 0.0013, 0.0007
TIMES = make_times(
    hop_seconds=HOP,
    transfer_seconds=TRANSFER,
    kv_bytes=1e-6,
    context_seconds=1e-6,
    pair_seconds=1e-6,
)
# A prompt of 64 tokens or more goes to the prefill worker, whose credits are many.
ROUTING = {
    "offload": {"prefillLengthThreshold": 64, "prefillQueueMax": 1000, "decodeLoadThreshold": 1000},
    "credits": {"batchesAhead": 64.0},
}


class TimedRunner(FakeRunner):
    """Notes the seconds of its batches."""

    def __init__(self, sizes: EngineSettings, times: StepModel) -> None:
        super().__init__(sizes.num_blocks, sizes.block_size)
        self.step_seconds = 0.0
        self._times = times

    def begin(self, prepared: Batch, sampled: object) -> None:
        self.step_seconds += self._times.seconds(work_of(prepared.items))
        super().begin(prepared, {})


class TimedCore:
    """A real core: messages before a step, outputs at its end.  on_output: takes them"""

    def __init__(
        self, time: SimulatedTime, network: FakeNetwork, name: str, sizes: EngineSettings
    ) -> None:
        self.runner = TimedRunner(sizes, TIMES)
        self.transport = FakeTransport(network, self.runner, name, lambda: time.now)
        epochs = iter(range(1, 10_000))
        self.core = EngineCore(
            sizes,
            self.runner,
            self.transport,
            lambda: time.now,
            lambda: next(epochs).to_bytes(16, "big"),
        )
        self.on_output: Callable[[m.EngineOutput], None]
        self._time, self._inbox, self._is_busy = time, list[m.EngineInput](), False
        self._delivered = Counter[bytes]()  # blocks, by epoch

    def post(self, message: m.EngineInput) -> None:
        self._inbox.append(message)
        self.wake()

    def wake(self) -> None:
        if not self._is_busy:
            self._turn()

    def _turn(self) -> None:
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            self.core.handle(message)
        self.runner.step_seconds = 0.0
        outputs = self.core.step()
        self._is_busy = True
        self._time.at(self._time.now + self.runner.step_seconds, self._ended, outputs)

    def _ended(self, outputs: list[m.EngineOutput]) -> None:
        self._is_busy = False
        for output in outputs:
            self.on_output(output)
        # A step is computed at its start here: later blocks are of the next one.
        sending = {
            epoch: self._delivered[epoch] + len(each.queued)
            for epoch, each in self.transport._sending.items()
        }
        self._time.at(self._time.now + TRANSFER, self._deliver, sending)
        if self.core.has_work or self._inbox or self.transport._events:
            self._turn()

    def _deliver(self, sending: dict[bytes, int]) -> None:
        for epoch, number in sending.items():
            while self._delivered[epoch] < number:
                self._delivered[epoch] += 1
                self.transport._deliver_block(epoch, self.transport._sending[epoch])
        if self.transport._events:
            self.wake()


@dataclass
class RealPair:
    """The flow of `serving.decode` without its connections."""

    time: SimulatedTime
    arrivals: list[TimedRequest]
    sizes: EngineSettings
    firsts: dict[str, float] = field(default_factory=dict)
    ends: dict[str, float] = field(default_factory=dict)
    first_tokens: dict[str, Token] = field(default_factory=dict)
    epochs: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        network = FakeNetwork()
        self.prefill = TimedCore(self.time, network, "p", self.sizes)
        self.decode = TimedCore(self.time, network, "d", self.sizes)
        self.prefill.on_output, self.decode.on_output = self._of_prefill, self._of_decode

    def run(self) -> None:
        for number, (at, _, _) in enumerate(self.arrivals):
            self.time.at(at, self._arrive, number)
        self.time.run(1000.0)

    def _spec(self, name: str) -> RequestSpec:
        _, prompt, output = self.arrivals[int(name)]
        sampling = SamplingParams(output, 0, temperature=0.0, ignore_eos=True)
        return RequestSpec(name, [int(name)] * prompt, sampling)

    def _arrive(self, number: int) -> None:
        spec = self._spec(str(number))
        is_remote = len(spec.prompt) >= 64
        self.decode.post(m.Receive(spec) if is_remote else m.Submit(spec))

    def _of_decode(self, output: m.EngineOutput) -> None:
        match output:
            case m.ReceiveReady(request_id=name, epoch=epoch, cached_tokens=cached):
                target = TransferTarget(epoch, "d", [], cached, output.block_ids)
                self.epochs[name] = epoch
                self._later(lambda: self.prefill.post(m.Prefill(self._spec(name), target)))
            case m.Tokens(tokens=tokens):
                for token in tokens:
                    self._token(token, self.time.now)
            case m.ReceiveRefused() | m.RequestFailed():
                raise AssertionError(output)

    def _of_prefill(self, output: m.EngineOutput) -> None:
        match output:
            case m.Tokens(tokens=tokens):
                for token in tokens:
                    self.first_tokens[token.request_id] = token
                    self._later(lambda token=token: self._token(token, self.time.now))
            case m.PrefillDone(request_id=name, checksum=checksum):
                first = self.first_tokens[name]
                done = m.ReceiveDone(name, self.epochs[name], first, checksum)
                self._later(lambda: self.decode.post(done))

    def _later(self, call: Callable[[], None]) -> None:
        self.time.at(self.time.now + HOP, lambda _: call())

    def _token(self, token: Token, now: float) -> None:
        self.firsts.setdefault(token.request_id, now)
        if token.finish_reason is not None:
            self.ends[token.request_id] = now


def check(arrivals: list[TimedRequest]) -> None:
    cluster = make_cluster(routing=ROUTING, engine={"numBlocks": 400, "maxSequences": 16})
    trace = make_trace(*arrivals)
    sizes = make_model(trace, cluster, TIMES).pools[0].settings
    real = RealPair(SimulatedTime(), arrivals, sizes)
    real.run()
    result = run(trace, cluster, TIMES)
    recorder = result.recorder

    assert recorder.outcomes == {"complete": len(arrivals)}
    assert recorder.num_preemptions == 0
    assert len(real.ends) == len(arrivals)
    found = sorted(zip(recorder.arrivals, recorder.ttft, recorder.end, strict=True))
    expected = sorted(
        (at, real.firsts[str(number)] - at, real.ends[str(number)])
        for number, (at, _, _) in enumerate(arrivals)
    )
    for simulated, measured in zip(found, expected, strict=True):
        assert simulated == pytest.approx(measured, abs=1e-6)


def test_two_prompts_at_the_prefill_worker_and_one_at_home():
    check([(0.0, 100, 12), (0.011, 150, 5), (0.0121, 40, 30)])


@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 8000), st.integers(1, 200), st.integers(2, 40)),
        min_size=1,
        max_size=12,
    ).map(apart)
)
def test_times_are_those_of_real_engine_cores(arrivals: list[TimedRequest]):
    check(arrivals)
