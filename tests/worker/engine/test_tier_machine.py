"""One engine whose conversations do not fit into its pool, over tiers whose copies come late, in
any order, damaged or not at all, while requests are aborted.

After every rule each block and slot has one state and its holders; every answer is that of the
formula of `tests.worker.fake_runner`, whatever was read from a tier.
"""

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
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from tests.worker.fake_clock import FakeClock
from tests.worker.fake_network import FakeNetwork, FakeTransport
from tests.worker.fake_runner import FakeRunner
from tests.worker.fake_tiers import FakeTiers

BLOCK_SIZE, NUM_BLOCKS, VOCAB = 4, 14, 29
USERS = [[(5 * i + user) % VOCAB for i in range(200)] for user in range(4)]


class TierMachine(RuleBasedStateMachine):
    @initialize(
        tiers=st.sampled_from([[3], [30], [8, 40]]),
        has_store=st.booleans(),
        scheduler=st.sampled_from(SCHEDULER_NAMES),
        policy=st.sampled_from(["priority", "preemptive"]),
        depth=st.sampled_from([1, 2]),
    )
    def choose(self, tiers, has_store, scheduler, policy, depth):
        own = SchedulerSettings(name=scheduler, policy=policy)
        sizes = EngineSettings(
            BLOCK_SIZE,
            NUM_BLOCKS,
            max_batched_tokens=1000 if own.computes_whole_prompts else 12,
            max_sequences=3,
            max_model_len=1000,
            scheduler=own,
        )
        self.clock = FakeClock()
        self.runner = FakeRunner(NUM_BLOCKS, BLOCK_SIZE, VOCAB, depth=depth)
        self.tiers = FakeTiers(self.runner, tiers, {} if has_store else None)
        transport = FakeTransport(FakeNetwork(), self.runner, "alone", self.clock)
        self.core = EngineCore(sizes, self.runner, transport, self.clock, tiers=self.tiers)
        self.runner.on_write = lambda block: self._check_state(block, BlockState.IN_USE)
        self.tiers.on_read = lambda block: self._check_state(block, BlockState.IN_USE)
        self.tiers.on_write = lambda block: self._check_state(
            block, BlockState.RECEIVING, BlockState.QUARANTINED
        )
        self.specs: dict[str, RequestSpec] = {}
        self.answers: dict[str, list[int]] = {}
        self.running: set[str] = set()
        self.sent: set[bytes] = set()

    @rule(
        user=st.integers(0, 3),
        num_tokens=st.integers(2, 40),
        max_tokens=st.integers(1, 8),
        priority=st.sampled_from([0, 0, 1]),
    )
    def ask(self, user, num_tokens, max_tokens, priority):
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
        name = f"r{len(self.specs)}"
        spec = RequestSpec(name, USERS[user][:num_tokens], sampling, priority=priority)
        self.specs[name], self.answers[name] = spec, []
        self.running.add(name)
        self.core.handle(m.Submit(spec))

    @rule(count=st.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self._step()

    @rule(user=st.integers(0, 3), num_tokens=st.integers(24, 44))
    def turn(self, user, num_tokens):
        self.ask(user, num_tokens, max_tokens=2, priority=0)
        self._finish()

    @rule(user=st.integers(0, 3), times=st.integers(1, 2))
    def come_back(self, user, times):
        for _ in range(times):
            self.ask(user, 43, max_tokens=3, priority=0)
        self._step()  # what it reads has not been copied

    @rule(count=st.integers(1, 6), last=st.booleans())
    def copy(self, count, last):
        self.tiers.copy(count, last=last)

    @rule(outcome=st.sampled_from(["damaged", "damaged", "damaged", "failed"]))
    def spoil(self, outcome):
        self.tiers.next_outcome = outcome

    @rule(data=st.data())
    def others_delete(self, data):
        """Blocks of a shared store."""
        if store := self.tiers.store:
            for key in data.draw(st.lists(st.sampled_from(sorted(store)), unique=True)):
                del store[key]

    @rule(reason=st.sampled_from(["", "gone"]))
    def answer_lookups(self, reason):
        self.tiers.refuses = reason

    @rule(seconds=st.sampled_from([0.01, 100.0]))
    def wait(self, seconds):
        self.tiers.seconds = seconds
        self.clock.advance(seconds)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(name)
        self.core.handle(m.Abort(name))

    @rule()
    def ask_snapshot(self):
        self.core.handle(m.AskSnapshot())

    @invariant()
    def all_is_whole(self):
        self.core.check()
        self.tiers.check(self.core)

    def teardown(self):
        self._finish()
        for _ in range(100):  # blocks that are new to the tiers
            self._step()
            if not self.tiers.queued:
                break
            self.tiers.copy()
        self.core.check()
        counts = self.core.pool.counts()
        assert counts["free"] + counts["cached"] == NUM_BLOCKS, counts
        tiers = self.core._tiers
        in_pool = set(self.core.pool.prefix_cache._block_ids)
        assert self.sent == in_pool.union(*(tier.slots for tier in tiers.tiers))

    def _finish(self):
        for _ in range(500):
            if not self.running:
                return
            self.tiers.copy()
            self._step()
            self.clock.advance(0.01)
        raise AssertionError("a request never ended")

    def _step(self):
        for output in self.core.step():
            if isinstance(output, m.Tokens):
                for token in output.tokens:
                    self._take(token)
            elif isinstance(output, m.BlockEvents):
                self.sent = set() if output.is_cleared else self.sent
                self.sent = (self.sent - set(output.removed)) | set(output.stored)
            assert not isinstance(output, m.RequestFailed), output

    def _take(self, token):
        answer, spec = self.answers[token.request_id], self.specs[token.request_id]
        answer.append(token.token_id)
        assert answer == self.runner.reference(spec.prompt, len(answer))
        if token.finish_reason is not None:
            self.running.discard(token.request_id)

    def _check_state(self, block, *states):
        assert self.core.pool.state(block) in states


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
