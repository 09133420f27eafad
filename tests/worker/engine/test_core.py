"""EngineCore: aborts in every state [V12], repeated ids, bad requests, statistics."""

import pytest

from pdcluster_worker.engine.pool_audit import SLICE_BLOCKS
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.requests import EPOCH_BYTES, TransferTarget

PROMPT = list(range(10))


def test_abort_of_a_waiting_request(engine, spec):
    """[V12], T1."""
    rig = engine(max_sequences=1)
    rig.handle(m.Submit(spec("a", [1], max_tokens=9)), m.Submit(spec("b", PROMPT)))
    rig.handle(m.Abort("b"))
    rig.run()
    assert rig.tokens("b") == []
    assert set(rig.blocks) == {"free", "cached"}


def test_abort_of_a_running_request(engine, spec):
    """[V12], T1: in the middle of a chunked prefill, and of decoding."""
    rig = engine(max_batched_tokens=4)
    rig.handle(m.Submit(spec("a", PROMPT)))
    rig.handle(m.Abort("a"), m.Submit(spec("b", [5, 6])))
    rig.handle(m.Abort("b"))
    assert not rig.core.has_work
    assert rig.blocks == {"free": 15, "cached": 1}
    assert rig.runner.forgotten == ["a", "b"]


def test_abort_of_a_receiving_request_waits_for_the_fence(pair, spec):
    """[V12], T1."""
    both = pair()
    both.decode.transport.holding = True
    both.start(spec("a", PROMPT))
    both.decode.handle(m.Abort("a"), m.Abort("a"))
    assert both.decode.blocks == {"free": 13, "quarantined": 3}
    both.decode.transport.settle()
    both.decode.step()
    assert both.decode.blocks == {"free": 16}


@pytest.mark.parametrize("sizes", [{}, {"max_batched_tokens": 4}], ids=["sending", "computing"])
def test_abort_of_a_request_that_is_sent_waits_for_the_transport(pair, spec, sizes):
    """[V12], T1: what a peer may still be sent is not reused."""
    both = pair(prefill=sizes)
    both.prefill.transport.holding = True
    both.start(spec("a", PROMPT))
    held = both.prefill.core.pool.num_blocks - both.prefill.core.pool.num_available
    both.prefill.handle(m.Abort("a"))
    assert both.prefill.blocks["in_use"] == (3 if not sizes else 1)
    assert held == 3
    both.network.deliver_all()
    both.prefill.transport.settle()
    both.prefill.step()
    assert set(both.prefill.blocks) == {"free", "cached"}
    assert both.prefill.of(m.PrefillDone) == both.prefill.of(m.PrefillFailed) == []


def test_abort_of_unknown_and_finished_requests_is_a_no_op(engine, spec):
    """[V12]."""
    rig = engine()
    rig.serve(spec("a"))
    before = rig.blocks
    rig.handle(m.Abort("a"), m.Abort("never"))
    assert rig.blocks == before


def test_a_repeated_id_of_a_live_request_is_ignored(pair, spec):
    """T8: whichever message repeats it."""
    both = pair()
    request = spec("a", PROMPT, max_tokens=4)
    ready = both.start(request)
    both.decode.handle(m.Submit(request), m.Receive(request))
    both.prefill.handle(
        m.Prefill(request, TransferTarget(ready.epoch, "decode", ["nowhere"], 0, ready.block_ids))
    )
    assert len(both.decode.of(m.ReceiveReady)) == 1
    assert both.decode.blocks == {"free": 13, "receiving": 3}
    assert len(both.prefill.tokens("a")) == 1
    assert both.prefill.of(m.RequestFailed) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": range(100)}, "100 tokens leave no room for output within max_model_len=100"),
        ({"output": [1, 2, 3]}, "max_tokens=3 are made already"),
    ],
)
@pytest.mark.parametrize("kind", [m.Submit, m.Receive])
def test_a_request_that_can_never_run_fails_with_the_reason(engine, spec, values, message, kind):
    rig = engine(num_blocks=40)
    rig.handle(kind(spec("a", **values)))
    failed = rig.of(m.RequestFailed)
    assert len(failed) == 1
    assert failed[0].message.startswith(message)
    assert failed[0].is_refusal  # by its own fault: a 400
    assert rig.blocks == {"free": 40}


def test_a_moved_request_goes_on_where_it_was(engine, spec):
    """Prompt and output come apart: limits count the whole output, tokens go on as if nothing had
    happened.
    """
    rig = engine()
    expected = rig.runner.reference(PROMPT, 6)
    rig.serve(spec("a", PROMPT, output=expected[:2], max_tokens=6))
    assert rig.token_ids("a") == expected[2:]
    assert rig.tokens("a")[-1].finish_reason == "length"


def test_the_answer_of_a_step_comes_in_the_order_of_events(engine, spec):
    rig = engine()
    kinds = [
        type(output)
        for output in rig.handle(
            m.Submit(spec("bad", [])), m.Submit(spec("a", PROMPT, max_tokens=1))
        )
    ]
    assert kinds == [m.RequestFailed, m.Tokens, m.BlockEvents, m.EngineStats]


def test_first_token_carries_queue_and_prefill_seconds_once(engine, spec):
    """Arrival to first scheduled, first scheduled to sampled; two chunks of 1 s each."""
    rig = engine(max_batched_tokens=5)
    rig.runner.on_execute = lambda: rig.clock.advance(1.0)
    rig.core.handle(m.Submit(spec("a", PROMPT)))
    rig.clock.advance(0.5)
    rig.run()
    times = [(token.queue_seconds, token.prefill_seconds) for token in rig.tokens("a")]
    assert times == [(0.5, 2.0), (None, None), (None, None)]


def test_a_preempted_request_says_its_times_only_once(engine, spec):
    rig = engine(num_blocks=5, prefix_caching=False)
    rig.submit({"a": range(8), "b": range(20, 28)}, max_tokens=6)
    rig.run()
    assert rig.stats.preemptions == 1
    assert [token.queue_seconds for token in rig.tokens("b")] == [0.0] + [None] * 5


def test_statistics_split_a_mixed_step_by_its_tokens(engine, spec):
    """Step 1: 2 prompt tokens. Step 2: 1 decode and 4 prompt tokens in 1 s: 0.2 s and 0.8 s."""
    rig = engine()
    rig.runner.on_execute = lambda: rig.clock.advance(1.0)
    rig.handle(m.Submit(spec("a", [1, 2], max_tokens=2)))
    rig.handle(m.Submit(spec("b", [3, 4, 5, 6], max_tokens=1)))
    stats = rig.stats
    assert (
        stats.prompt_tokens,
        stats.prefill_tokens,
        stats.generation_tokens,
        stats.num_steps,
    ) == (6, 6, 3, 2)
    assert (stats.prefill_seconds, stats.decode_seconds) == pytest.approx((1.8, 0.2))
    assert (stats.busy_seconds, stats.overhead_seconds) == (2.0, 0.0)
    assert [step for output in rig.of(m.EngineStats) for step in output.steps] == [
        ("prefill", 1.0),
        ("mixed", 1.0),
    ]


def test_statistics_are_sent_ten_times_a_second_and_when_idle(engine, spec):
    rig = engine()
    rig.runner.on_execute = lambda: rig.clock.advance(0.03)
    rig.serve(spec("a", [1], max_tokens=10))
    assert len(rig.of(m.EngineStats)) == 3  # after 0.12 s, 0.24 s, and at the end after 0.30 s
    assert rig.stats.num_running == 0
    assert rig.step() == []


def test_statistics_count_waiting_tokens_of_queued_and_unfinished_prefills(engine, spec):
    rig = engine(max_batched_tokens=4, max_sequences=1)
    rig.core.handle(m.Submit(spec("a", PROMPT)))
    rig.clock.advance(1.0)
    rig.handle(m.Submit(spec("b", [1, 2, 3])))
    assert rig.stats.waiting_tokens == 6 + 3
    assert (rig.stats.num_running, rig.stats.num_waiting) == (1, 1)
    assert rig.stats.free_blocks == rig.core.pool.num_available


def test_statistics_count_transfers_until_the_last_block_is_safe(pair, spec):
    """On both sides, though the request is gone: what is not fenced may be written, what is not
    ended may be read.
    """
    both = pair()
    both.prefill.transport.holding = both.decode.transport.holding = True
    both.start(spec("a", PROMPT))
    for side in (both.decode, both.prefill):
        assert (side.stats.num_transfers, side.stats.num_inputs) == (1, 1)
        side.handle(m.Abort("a"))
        assert (side.stats.num_transfers, side.stats.num_inputs) == (1, 2)
    for side in (both.decode, both.prefill):
        side.transport.settle()
        side.step()
        assert side.stats.num_transfers == 0


def test_idle_engine_checks_its_pool_after_its_output_is_out(engine, spec):
    """A lost reference stops the engine instead of corrupting a later request, and the check delays
    no token.
    """
    rig = engine()
    rig.core.handle(m.Submit(spec("a", max_tokens=1)))
    rig.core.pool.allocate(1)
    rig.core.check_when_idle()  # there is work: not now
    assert any(isinstance(output, m.Tokens) for output in rig.core.step())
    with pytest.raises(AssertionError, match="has 1 references, 0 holders are known"):
        rig.core.check_when_idle()


def test_an_idle_engine_checks_a_slice_of_its_pool_a_turn_and_then_rests(engine, spec):
    rig = engine(num_blocks=5 * SLICE_BLOCKS)
    rig.handle(m.Submit(spec("a", max_tokens=1)))
    looked = []
    check = rig.core.pool.check_blocks
    rig.core.pool.check_blocks = lambda block_ids, held: (
        looked.append(len(block_ids)),
        check(block_ids, held),
    )
    while rig.core.next_wake_seconds() is not None:
        rig.core.check_when_idle()
    assert looked == [SLICE_BLOCKS] * 4  # one of five was looked at before
    rig.core.check_when_idle()  # as after a ping: nothing has happened
    assert len(looked) == 4


def test_the_next_turn_of_the_check_waits_for_a_hundred_times_its_cost(engine, spec):
    rig = engine(num_blocks=3 * SLICE_BLOCKS)
    rig.handle(m.Submit(spec("a", max_tokens=1)))
    assert rig.core.next_wake_seconds() == 0.0
    check = rig.core.pool.check_totals
    rig.core.pool.check_totals = lambda: (rig.clock.advance(0.01), check())
    rig.core.check_when_idle()
    assert rig.core.next_wake_seconds() == pytest.approx(100 * 0.01 - 0.01)


def test_epochs_are_unguessable_by_default(engine):
    rig = engine()
    core = type(rig.core)(rig.settings, rig.runner, rig.transport, rig.clock)
    epochs = {core._receiver._new_epoch() for _ in range(100)}
    assert len(epochs) == 100
    assert {len(epoch) for epoch in epochs} == {EPOCH_BYTES}
