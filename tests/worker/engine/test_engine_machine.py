"""Two engine cores, each with any scheduler, a network that may be late, lossy or wrong, and a
server that may give up at any moment.

The machine plays the server processes of a decode and a prefill worker.  After
every rule both pools must be whole; every block that is read or written must
belong to the one that does it; at the end every request has the answer that the
formula of `tests.worker.fake_runner` gives, and both pools are empty again.
With and without a window in every layer, with and without a watermark, with and
without a second step that is submitted while one computes, and with and without tiers
below the pool whose copies may be late, damaged or refused.
"""

from collections import deque
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdcluster_worker.engine.block_pool import BlockState
from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import (
    SCHEDULER_NAMES,
    EngineSettings,
    SchedulerSettings,
)
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token, TransferTarget
from tests.worker.fake_clock import FakeClock
from tests.worker.fake_network import FakeNetwork, FakeTransport
from tests.worker.fake_runner import FakeRunner
from tests.worker.fake_tiers import FakeTiers

BLOCK_SIZE = 4
DECODE_BLOCKS, PREFILL_BLOCKS = 16, 10
VOCAB, EOS = 29, 7
MAX_MODEL_LEN = 1000
BASE = [(5 * i + 3) % VOCAB for i in range(40)]  # prompts share prefixes of this


@dataclass
class Client:
    spec: RequestSpec
    home: "Engine"
    remote: bool
    shown: list[int] = field(default_factory=list)
    first: Token | None = None  # made by the prefill worker
    epoch: bytes | None = None
    refused: bool = False
    over: bool = False  # finished, failed or aborted
    failure: str | None = None
    aborted: bool = False

    @property
    def at_prefill(self) -> bool:
        """Between ReceiveReady and the word to the decode engine how it ended."""
        return self.epoch is not None


class Engine:
    """One core with everything around it."""

    def __init__(
        self,
        name: str,
        sizes: EngineSettings,
        network: FakeNetwork,
        clock: FakeClock,
        *,
        depth: int,
        tiers: list[int],
    ) -> None:
        self.runner = FakeRunner(
            sizes.num_blocks, BLOCK_SIZE, VOCAB, window=sizes.window, depth=depth
        )
        self.transport = FakeTransport(network, self.runner, name, clock)
        self.budget = sizes.max_batched_tokens
        epochs = (bytes([i % 251]) * 8 + i.to_bytes(8, "big") for i in range(1, 1 << 30))
        self.tiers = FakeTiers(self.runner, tiers)
        self.core = EngineCore(
            sizes, self.runner, self.transport, clock, lambda: next(epochs), tiers=self.tiers
        )
        self.inbox: deque[m.EngineInput] = deque()
        self.runner.on_write = self._check_private
        self.tiers.on_read = lambda block: self._check_state(block, BlockState.IN_USE)
        self.tiers.on_write = lambda block: self._check_state(
            block, BlockState.RECEIVING, BlockState.QUARANTINED
        )
        self.transport.on_read = lambda block: self._check_state(block, BlockState.IN_USE)
        self.transport.on_write = lambda block: self._check_state(
            block, BlockState.RECEIVING, BlockState.QUARANTINED
        )

    def step(self) -> list[m.EngineOutput]:
        while self.inbox:
            self.core.handle(self.inbox.popleft())
        return self.core.step()

    def _check_private(self, block: int) -> None:
        pool = self.core.pool
        assert pool.state(block) is BlockState.IN_USE
        assert pool.ref_count(block) == 1
        assert block not in pool.prefix_cache

    def _check_state(self, block: int, *states: BlockState) -> None:
        assert self.core.pool.state(block) in states


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.network = FakeNetwork()
        self.clients: dict[str, Client] = {}
        self.verify = True

    @initialize(
        verify=st.booleans(),
        window=st.sampled_from([None, None, 1, 6, 11]),
        watermark=st.sampled_from([0.0, 0.0, 0.2]),
        depth=st.sampled_from([1, 2]),
        policy=st.sampled_from(["priority", "preemptive"]),
        decode=st.sampled_from(SCHEDULER_NAMES),
        prefill=st.sampled_from(SCHEDULER_NAMES),
        tiers=st.sampled_from([[], [5], [40], [6, 12]]),
    )
    def choose(self, verify, window, watermark, depth, policy, decode, prefill, tiers=()):
        def engine(name: str, num_blocks: int, scheduler: str) -> Engine:
            own = SchedulerSettings(name=scheduler, policy=policy)
            budget = MAX_MODEL_LEN if own.computes_whole_prompts else 9
            sizes = EngineSettings(
                BLOCK_SIZE,
                num_blocks,
                max_batched_tokens=budget,
                max_sequences=3,
                max_model_len=MAX_MODEL_LEN,
                scheduler=own,
                window=window,
                admission_watermark=watermark,
            )
            has_tiers = [] if window is not None else list(tiers)
            return Engine(name, sizes, self.network, self.clock, depth=depth, tiers=has_tiers)

        self.decode = engine("decode", DECODE_BLOCKS, decode)
        self.prefill = engine("prefill", PREFILL_BLOCKS, prefill)
        self.verify = self.decode.transport.verify = self.prefill.transport.verify = verify

    # --- rules --------------------------------------------------------------------------------

    @rule(
        num_shared=st.integers(1, 24),
        suffix=st.lists(st.integers(0, VOCAB - 1), max_size=6),
        max_tokens=st.integers(1, 16),
        where=st.sampled_from(["local", "remote", "remote", "prefill"]),
        priority=st.sampled_from([0, 0, 1]),
        group=st.sampled_from(["", "a", "b"]),
        stops=st.booleans(),
    )
    def ask(self, num_shared, suffix, max_tokens, where, priority, group, stops):
        sampling = SamplingParams(
            max_tokens=max_tokens, seed=0, eos_token_ids=[EOS], ignore_eos=not stops
        )
        spec = RequestSpec(
            f"r{len(self.clients)}",
            [*BASE[:num_shared], *suffix],
            sampling,
            priority=priority,
            group=group,
        )
        # "prefill": decoded on the prefill engine, which forces preemptions of requests that are
        # being sent
        home = self.prefill if where == "prefill" else self.decode
        self.clients[spec.request_id] = Client(spec, home, where == "remote")
        home.inbox.append(m.Receive(spec) if where == "remote" else m.Submit(spec))

    @rule()
    def step_decode(self):
        self._take(self.decode, self.decode.step())

    @rule()
    def step_prefill(self):
        self._take(self.prefill, self.prefill.step())

    @rule(count=st.integers(1, 6))
    def run(self, count):
        for _ in range(count):
            self.step_decode()
            self.step_prefill()
            self.network.deliver_all()

    @rule(count=st.integers(1, 4))
    def deliver(self, count):
        for _ in range(count):
            self.prefill.transport.deliver()

    @rule()
    def break_connection(self):
        self.prefill.transport.fail("connection reset by peer")

    @rule()
    def corrupt(self):
        self.network.corrupt_next = self.verify  # nothing else would notice

    @rule(holding=st.booleans())
    def hold(self, holding):
        self.decode.transport.holding = self.prefill.transport.holding = holding

    @rule()
    def settle(self):
        self.decode.transport.settle()
        self.prefill.transport.settle()

    @rule(count=st.integers(1, 8), last=st.booleans(), at_prefill=st.booleans())
    def copy(self, count, last, at_prefill):
        (self.prefill if at_prefill else self.decode).tiers.copy(count, last=last)

    @rule(outcome=st.sampled_from(["damaged", "damaged", "failed"]), at_prefill=st.booleans())
    def spoil(self, outcome, at_prefill):
        (self.prefill if at_prefill else self.decode).tiers.next_outcome = outcome

    @rule(seconds=st.sampled_from([0.01, 1.0, 40.0]))
    def wait(self, seconds):
        self.clock.advance(seconds)

    @rule(groups=st.sets(st.sampled_from(["a", "b"])), evicts=st.booleans(), at_both=st.booleans())
    def defer(self, groups, evicts, at_both):
        for engine in (self.decode, self.prefill) if at_both else (self.decode,):
            engine.inbox.append(m.DeferGroups(sorted(groups), evicts))

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def abort(self, data):
        client = data.draw(st.sampled_from(list(self.clients.values())))
        client.aborted = client.over = True
        client.epoch = None
        self.decode.inbox.append(m.Abort(client.spec.request_id))
        self.prefill.inbox.append(m.Abort(client.spec.request_id))

    @precondition(lambda self: any(client.at_prefill for client in self.clients.values()))
    @rule(data=st.data())
    def give_up(self, data):
        client = data.draw(
            st.sampled_from([client for client in self.clients.values() if client.at_prefill])
        )
        self.prefill.inbox.append(m.Abort(client.spec.request_id))
        self._end_remote(
            client, m.ReceiveFailed(client.spec.request_id, client.epoch, client.first)
        )

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), at_prefill=st.booleans())
    def poison(self, data, at_prefill):
        runner = (self.prefill if at_prefill else self.decode).runner
        runner.failing = {data.draw(st.sampled_from(list(self.clients))): ValueError("poisoned")}

    @precondition(lambda self: any(not client.over for client in self.clients.values()))
    @rule(data=st.data())
    def repeat(self, data):
        client = data.draw(
            st.sampled_from([client for client in self.clients.values() if not client.over])
        )
        if not client.remote:  # T8: the id is live, so this is ignored
            client.home.inbox.append(m.Submit(client.spec))

    @invariant()
    def pools_are_whole(self):
        for engine in (self.decode, self.prefill):
            engine.core.check()
            pool, tables = engine.core.pool, engine.core._tables
            assert sum(pool.counts().values()) == pool.num_blocks
            assert tables.num_promised <= pool.num_available  # what was promised is there

    @invariant()
    def queues_are_in_order(self):
        for engine in (self.decode, self.prefill):
            scheduler = engine.core._scheduler
            for queue, key in (
                (scheduler.waiting, scheduler.order.waiting),
                (scheduler.ready, scheduler.order.running),
                (scheduler.running, scheduler.order.running),
            ):
                assert queue == sorted(queue, key=key)

    @invariant()
    def steps_keep_their_budget(self):
        for engine in (self.decode, self.prefill):
            assert all(
                sum(count for _, count in batch) <= engine.budget
                for batch in engine.runner.executed[-1:]
            )
            assert all(len(batch) <= 3 for batch in engine.runner.executed[-1:])

    def teardown(self):
        for engine in (self.decode, self.prefill):
            engine.transport.holding = False
            engine.runner.failing = {}
        for _ in range(1000):
            if self._is_quiet():
                break
            self.settle()
            self.copy_all()
            self.step_decode()
            self.step_prefill()
            self.network.deliver_all()
            self.clock.advance(0.1)
        assert self._is_quiet(), "a request never ended"
        self.settle()
        for _ in range(3):  # what an abort left behind: fences, cancels
            self.copy_all()
            self.step_decode()
            self.step_prefill()
        for _ in range(100):  # blocks that are new to the tiers
            self.step_decode()
            self.step_prefill()
            if not (self.decode.tiers.queued or self.prefill.tiers.queued):
                break
            self.copy_all()
        for engine in (self.decode, self.prefill):
            engine.core.check()
            engine.tiers.check(engine.core)
            counts = engine.core.pool.counts()
            assert counts["free"] + counts["cached"] == engine.core.pool.num_blocks, counts
            assert not engine.core.has_work
        for client in self.clients.values():
            self._check_answer(client)

    def copy_all(self):
        for engine in (self.decode, self.prefill):
            engine.tiers.copy(1000, last=False)

    # --- the server processes -----------------------------------------------------------------

    def _is_quiet(self) -> bool:
        return (
            all(client.over for client in self.clients.values())
            and not self.decode.inbox
            and not self.prefill.inbox
        )

    def _take(self, engine: Engine, outputs: list[m.EngineOutput]) -> None:
        for output in outputs:
            if isinstance(output, m.Tokens):
                for token in output.tokens:
                    self._take_token(engine, token)
            elif not isinstance(output, m.EngineStats | m.BlockEvents):
                client = self.clients[output.request_id]
                if not client.over:
                    self._take_answer(engine, client, output)

    def _take_token(self, engine: Engine, token: Token) -> None:
        client = self.clients[token.request_id]
        if client.over or (engine is not client.home and not client.at_prefill):
            return
        client.shown.append(token.token_id)
        if engine is not client.home:
            client.first = token
        if token.finish_reason is not None:
            client.over = True
            if engine is not client.home:
                self._end_remote(client, m.ReceiveDone(token.request_id, client.epoch, token))

    def _take_answer(self, engine: Engine, client: Client, output: m.EngineOutput) -> None:
        request_id = client.spec.request_id
        match output:
            case m.ReceiveReady(epoch=epoch, cached_tokens=cached, block_ids=block_ids):
                client.epoch = epoch
                self.prefill.inbox.append(
                    m.Prefill(
                        client.spec, TransferTarget(epoch, "decode", ["nowhere"], cached, block_ids)
                    )
                )
            case m.ReceiveRefused(needed_blocks=needed):
                assert needed <= DECODE_BLOCKS
                client.remote = not client.refused  # once more, then locally
                client.refused = True
                self.decode.inbox.append(
                    m.Receive(client.spec) if client.remote else m.Submit(client.spec)
                )
            case m.PrefillDone(checksum=checksum) if client.at_prefill:
                self._end_remote(
                    client, m.ReceiveDone(request_id, client.epoch, client.first, checksum)
                )
            case m.PrefillFailed() if client.at_prefill:
                self._end_remote(client, m.ReceiveFailed(request_id, client.epoch, client.first))
            case m.RequestFailed(message=message) if engine is client.home:
                client.over, client.failure = True, message
            case m.RequestFailed() if client.at_prefill:
                self._end_remote(client, m.ReceiveFailed(request_id, client.epoch, client.first))

    def _end_remote(self, client: Client, message: m.EngineInput) -> None:
        client.epoch = None
        self.decode.inbox.append(message)

    def _check_answer(self, client: Client) -> None:
        prompt, sampling = client.spec.prompt, client.spec.sampling
        expected = self.decode.runner.reference(prompt, sampling.max_tokens)
        if not sampling.ignore_eos and EOS in expected:
            expected = expected[: expected.index(EOS) + 1]
        if client.failure is not None:
            num_tokens = len(prompt) + len(client.shown)
            assert (
                "poisoned" in client.failure
                or num_tokens + 1 > client.home.core.pool.num_blocks * BLOCK_SIZE
            ), client.failure
        if client.aborted or client.failure is not None:
            assert client.shown == expected[: len(client.shown)]
        else:
            assert client.shown == expected


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=250, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_a_chunk_waits_for_blocks_that_leave_the_window_by_a_step_in_flight() -> None:
    machine = EngineMachine()
    machine.choose(
        verify=False,
        window=11,
        watermark=0.0,
        depth=2,
        policy="priority",
        decode="continuous",
        prefill="continuous",
    )
    one = {"max_tokens": 1, "priority": 0, "group": "", "stops": False}
    for num_shared, suffix in ((16, []), (4, []), (10, [0, 0])):
        machine.ask(num_shared=num_shared, suffix=suffix, where="remote", **one)
    machine.ask(num_shared=22, suffix=[0, 0, 0], where="local", **one)
    machine.teardown()
