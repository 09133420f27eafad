"""One state machine for every scheduler, by itself: no core, no runner, blocks from a real pool
[V3] [V4].

The machine computes what is scheduled, sends requests away as a prefill worker
does, brings in received ones as a decode worker does, and lets others hold
blocks for a while.  After every rule the blocks in use are those of the known
requests and of the others; at the end every request has all its tokens.
"""

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.request import EngineRequest, Status
from pdcluster_worker.engine.scheduler.policies import SCHEDULERS, make_scheduler
from pdcluster_worker.messages.engine_settings import (
    ChunkSchedule,
    EngineSettings,
    SchedulerSettings,
)
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, TransferTarget

NUM_BLOCKS, BLOCK_SIZE, SEATS = 14, 4, 3
MAX_MODEL_LEN = 48

OWN = [SchedulerSettings(name=name) for name in SCHEDULERS] + [
    SchedulerSettings(policy="fcfs"),
    *(SchedulerSettings(name=name, policy="preemptive") for name in SCHEDULERS),
    SchedulerSettings(long_prefill_token_threshold=3),
    SchedulerSettings(chunked_prefill=False),
    SchedulerSettings(name="sarathi", tbt_slo_seconds=0.02),
    SchedulerSettings(
        name="sarathi",
        chunk_schedule=ChunkSchedule(low=2, high=9, stages=3, max_tokens=MAX_MODEL_LEN),
    ),
]


@dataclass(frozen=True)
class Snapshot:
    """All that an empty schedule must leave as it was, seats of ready requests aside."""

    waiting: tuple[str, ...]
    newly_running: tuple[str, ...]
    blocks: tuple[tuple[str, tuple[int, ...]], ...]


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, EngineRequest] = {}
        self.num_asked = 0
        self.held: list[list[int]] = []

    @initialize(own=st.sampled_from(OWN), budget=st.sampled_from([3, 9, MAX_MODEL_LEN]))
    def choose(self, own, budget):
        if own.computes_whole_prompts:
            budget = MAX_MODEL_LEN
        sizes = EngineSettings(BLOCK_SIZE, NUM_BLOCKS, budget, SEATS, MAX_MODEL_LEN, scheduler=own)
        self.sizes = sizes
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables = BlockTables(sizes, self.pool)
        self.scheduler = make_scheduler(sizes, self.tables)

    # --- rules --------------------------------------------------------------------------------

    def _request(self, num_prompt, max_tokens, priority, target=None):
        name = f"r{self.num_asked}"
        self.num_asked += 1
        sampling = SamplingParams(max_tokens=max_tokens, seed=0)
        # Prompts share prefixes, so that hits count too.
        spec = RequestSpec(name, [i % 7 for i in range(num_prompt)], sampling, priority=priority)
        request = EngineRequest.from_spec(spec, float(self.num_asked), target)
        self.requests[name] = request
        return request

    @rule(
        num_prompt=st.integers(1, 30),
        max_tokens=st.integers(1, 12),
        priority=st.sampled_from([0, 0, 1]),
        leaves=st.booleans(),
    )
    def ask(self, num_prompt, max_tokens, priority, leaves):
        target = TransferTarget(b"e", "peer", ["nowhere"], 0, []) if leaves else None
        self.scheduler.add(self._request(num_prompt, max_tokens, priority, target))

    @rule(num_prompt=st.integers(1, 30), max_tokens=st.integers(2, 12))
    def receive(self, num_prompt, max_tokens):
        """As `engine.receiving` does: blocks at once or not at all, and KV of the whole prompt."""
        request = self._request(num_prompt, max_tokens, 0)
        num_tokens = max(num_prompt + 1, self.scheduler.num_admission_tokens(request))
        reservation = self.tables.reservation(request, num_tokens)
        needed = reservation.num_needed + self.scheduler.num_reserved_blocks
        if needed > self.pool.num_available:
            del self.requests[request.request_id]
            return
        self.tables.take(request, reservation)
        self.tables.advance(request, num_prompt - request.num_computed_tokens)
        request.tokens.append(5)
        self.scheduler.add_ready(request)

    @rule(count=st.integers(1, 8), admit=st.booleans(), slow=st.booleans())
    def step(self, count, admit, slow):
        for _ in range(count):
            self._step(admit=admit, seconds=0.05 if slow else 0.005)

    @rule(count=st.integers(1, 6))
    def hold(self, count):
        """Blocks of transfers: as many as new requests may have."""
        free = self.pool.num_available - self.scheduler.num_reserved_blocks
        if free >= count:
            self.held.append(self.pool.allocate(count))

    @rule()
    def let_go(self):
        if self.held:
            self.pool.release(self.held.pop())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        self._end(self.requests[data.draw(st.sampled_from(sorted(self.requests)))])

    @invariant()
    def no_block_is_lost(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        held: dict[int, int] = {}
        for blocks in [*self.held, *(r.block_table for r in self.requests.values())]:
            for block in blocks:
                held[block] = held.get(block, 0) + 1
        self.pool.check_blocks(range(NUM_BLOCKS), held)

    @invariant()
    def every_request_stands_in_one_queue(self):
        if not hasattr(self, "pool"):
            return
        scheduler = self.scheduler
        standing = [*scheduler.waiting, *scheduler.ready, *scheduler.running]
        assert sorted(r.request_id for r in standing) == sorted(self.requests)
        assert len(scheduler.running) <= SEATS
        assert all(not request.block_table for request in scheduler.waiting)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        while self.held:
            self.let_go()
        for _ in range(600):
            if not self.requests:
                break
            assert self._step().progressed, "nothing else holds blocks, and nothing moves"
        assert not self.requests, "a request starves"
        assert self.pool.num_available == NUM_BLOCKS

    # --- the engine's part ----------------------------------------------------------------------

    def _step(self, *, admit=True, seconds=0.005):
        self.scheduler.preempt_for_priority()
        before = self._snapshot()
        waiting = set(self.scheduler.waiting)
        step = self.scheduler.schedule(admit=admit)
        self._check(step)
        if not step.progressed:
            assert self._snapshot() == before, "an empty step changed something"
            return step
        if not admit:
            assert not waiting & set(step.items), "admitted though it was not to be"
        for request, reason in step.failed:
            assert "do not fit into the KV cache" in reason
            self._end(request)
        self._compute(step)
        if step.items:
            self.scheduler.completed(step.batch.num_tokens, seconds)
        return step

    def _check(self, step):
        items = step.items.values()
        assert sum(item.num_tokens for item in items) <= self.sizes.max_batched_tokens
        assert all(item.num_tokens > 0 for item in items)
        for item in items:
            assert item.end <= len(item.request.block_table) * BLOCK_SIZE, "no block for a token"
            assert item.request in self.scheduler.running
            assert item.request.status is Status.RUNNING
            if self.sizes.scheduler.computes_whole_prompts:
                assert item.samples
        for request in self.scheduler.ready:
            assert len(self.scheduler.running) == SEATS or self._waits_for_batch(request)

    def _waits_for_batch(self, request):
        return self.sizes.scheduler.name == "request-level" and bool(self.scheduler.running)

    def _compute(self, step):
        done = []
        for request, item in step.items.items():
            samples = item.samples
            self.tables.advance(request, item.num_tokens)
            if not samples:
                continue
            request.tokens.append(6)
            ends = request.num_output_tokens >= request.sampling.max_tokens
            if ends or request.target is not None or request.num_tokens >= MAX_MODEL_LEN:
                done.append(request)
        for request in done:
            self._end(request)

    def _end(self, request):
        self.scheduler.remove(request)
        self.tables.release(request)
        del self.requests[request.request_id]

    def _snapshot(self):
        scheduler = self.scheduler
        newly_running = sorted(r.request_id for r in [*scheduler.ready, *scheduler.running])
        blocks = [(r.request_id, tuple(r.block_table)) for r in self.requests.values()]
        waiting = tuple(r.request_id for r in scheduler.waiting)
        return Snapshot(waiting, tuple(newly_running), tuple(blocks))


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
