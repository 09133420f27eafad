"""The prefill side of a transfer: what is written when, and until when source blocks are held."""

import pytest

from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.requests import TransferTarget

PROMPT = list(range(10))  # 3 blocks of 4


def aim(rig, request, num_blocks, cached_tokens=0, epoch=b"e" * 16):
    """Prefill towards blocks 0.. of an engine "decode" that has opened them."""
    blocks = list(range(num_blocks))
    rig.handle(
        m.Prefill(request, TransferTarget(epoch, "decode", ["nowhere"], cached_tokens, blocks))
    )


def test_full_blocks_are_written_while_later_chunks_compute(pair, spec):
    """A budget of 4: one block is finished in each step; the partial one goes last, after the first
    token.
    """
    both = pair(prefill={"max_batched_tokens": 4})
    both.start(spec("a", PROMPT), prefill_step=False)
    moved = []
    for _ in range(3):
        both.prefill.step()
        both.clock.advance(1.0)
        moved.append(sum(1 for _ in iter(both.prefill.transport.deliver, False)))
    assert moved == [1, 1, 1]
    assert both.prefill.token_ids("a") == both.prefill.runner.reference(PROMPT, 1)
    both.clock.advance(2.0)
    both.prefill.step()
    done = both.prefill.of(m.PrefillDone)[0]
    assert (done.num_bytes, done.seconds) == (3 * both.prefill.runner.block_bytes, 3.0)
    assert both.prefill.transport.forgotten == [both.decode.of(m.ReceiveReady)[0].epoch]
    assert both.prefill.blocks == {"free": 14, "cached": 2}


def test_the_time_between_chunks_is_no_part_of_the_time_that_something_was_under_way(pair, spec):
    """A block is written after each of three steps of 5 s, and acknowledged 1 s later: within the
    next step.
    """
    both = pair(prefill={"max_batched_tokens": 4})
    both.start(spec("a", PROMPT), prefill_step=False)

    def compute():
        both.clock.advance(1.0)
        both.prefill.transport.deliver()
        both.clock.advance(4.0)

    both.prefill.runner.on_execute = compute
    for _ in range(3):
        both.prefill.step()
    compute()  # for another request
    both.prefill.step()
    done = both.prefill.of(m.PrefillDone)[0]
    assert (done.seconds, done.busy_seconds) == (11.0, 3.0)


def test_writes_that_overlap_are_under_way_once(pair, spec):
    """Steps of 2 s; each block takes 3 s, so that the next one is queued before it is
    acknowledged.
    """
    both = pair(prefill={"max_batched_tokens": 4})
    both.start(spec("a", PROMPT), prefill_step=False)
    both.prefill.runner.on_execute = lambda: both.clock.advance(2.0)
    both.prefill.step()  # writes at 2
    both.prefill.step()  # at 4
    both.clock.advance(1.0)
    both.prefill.transport.deliver()  # at 5
    both.prefill.step()  # at 7
    both.prefill.transport.deliver()
    both.clock.advance(1.0)
    both.prefill.transport.deliver()  # at 8
    both.prefill.step()
    done = both.prefill.of(m.PrefillDone)[0]
    assert (done.seconds, done.busy_seconds) == (6.0, 6.0)


def test_source_blocks_are_held_until_each_is_acknowledged(pair, spec):
    both = pair()
    both.start(spec("a", PROMPT))
    assert both.prefill.blocks == {"free": 13, "in_use": 3}
    both.prefill.transport.deliver()
    both.prefill.step()
    assert both.prefill.blocks == {"free": 13, "cached": 1, "in_use": 2}
    assert both.prefill.of(m.PrefillDone) == []


def test_own_prefix_hits_are_written_too_before_anything_is_computed(pair, spec):
    both = pair(prefill={"max_batched_tokens": 8})
    both.prefill.serve(spec("before", PROMPT, max_tokens=1))
    both.prefill.runner.on_execute = lambda: queued.append(
        len(both.prefill.transport.queued_blocks())
    )
    queued = []
    both.start(spec("a", PROMPT))
    assert queued == [2]
    assert both.prefill.tokens("a")[0].cached_tokens == 8
    both.network.deliver_all()
    both.prefill.step()
    assert both.prefill.of(m.PrefillDone)[0].num_bytes == 3 * both.prefill.runner.block_bytes


def test_a_prefill_for_a_peer_does_not_end_by_the_length_of_this_worker(pair, spec):
    """The peer goes on with it, by its own length."""
    both = pair(prefill={"max_model_len": 11})
    both.start(spec("a", PROMPT, max_tokens=9))
    assert both.prefill.tokens("a")[0].finish_reason is None


def test_a_request_known_to_end_at_its_first_token_writes_nothing(pair, spec):
    both = pair()
    both.start(spec("a", PROMPT, max_tokens=1))
    assert both.prefill.tokens("a")[0].finish_reason == "length"
    assert both.prefill.transport.queued_blocks() == []
    assert both.prefill.blocks == {"free": 14, "cached": 2}


def test_a_first_token_that_ends_the_request_cancels_what_was_written(pair, spec):
    """The stop token is only known at the end; blocks stay held until the transport has let go of
    them.
    """
    both = pair(prefill={"max_batched_tokens": 4})
    both.prefill.transport.holding = True
    stop = both.prefill.runner.reference(PROMPT, 1)
    both.start(spec("a", PROMPT, eos_token_ids=stop), prefill_step=False)
    both.prefill.run()
    assert both.prefill.tokens("a")[0].finish_reason == "stop"
    assert both.prefill.blocks == {"free": 14, "in_use": 2}
    both.prefill.transport.settle()
    both.prefill.step()
    assert both.prefill.blocks == {"free": 14, "cached": 2}
    assert both.prefill.of(m.PrefillDone) == both.prefill.of(m.PrefillFailed) == []


def test_a_broken_connection_fails_the_prefill_and_stops_its_compute(pair, spec):
    both = pair(prefill={"max_batched_tokens": 4})
    both.start(spec("a", PROMPT))
    both.prefill.transport.fail("connection reset by peer")
    both.prefill.run()
    assert both.prefill.of(m.PrefillFailed) == [m.PrefillFailed("a", "connection reset by peer")]
    assert both.prefill.runner.executed == [[("a", 4)]]
    assert both.prefill.blocks == {"free": 15, "cached": 1}


def test_a_write_to_a_dead_epoch_is_refused_and_fails_the_prefill(pair, spec):
    """T4: the decode side has given the request up and fenced."""
    both = pair()
    both.start(spec("a", PROMPT))
    both.decode.handle(m.Abort("a"))
    both.network.deliver_all()
    both.prefill.step()
    assert both.prefill.of(m.PrefillFailed) == [m.PrefillFailed("a", "refused: dead epoch")]
    assert set(both.prefill.blocks) == {"free", "cached"}


def test_a_preempted_prefill_is_recomputed_and_writes_each_block_once(pair, spec):
    """[V25]: the target accepts a block once; the fake transport asserts it."""
    both = pair(prefill={"num_blocks": 6, "max_batched_tokens": 5, "prefix_caching": False})
    both.prefill.handle(m.Submit(spec("local", [1, 2, 3, 4], max_tokens=12)))
    both.clock.advance(1)
    prompt = list(range(20, 36))
    both.start(spec("a", prompt, max_tokens=4))
    both.finish()
    both.check(prompt, 4)
    assert both.prefill.stats.preemptions == 1
    assert both.prefill.of(m.PrefillDone)[0].num_bytes == 4 * both.prefill.runner.block_bytes


@pytest.mark.parametrize(
    ("num_blocks", "cached_tokens", "reason"),
    [
        (2, 0, "target.block_ids has 2 blocks, the request needs 3"),
        (2, 3, "target.cached_tokens=3 is not a multiple of 4"),
        (1, 12, "target.cached_tokens=12 is not a multiple of 4 below the request's 10 tokens"),
    ],
)
def test_a_target_that_does_not_fit_the_request_is_refused(
    engine, spec, num_blocks, cached_tokens, reason
):
    rig = engine()
    aim(rig, spec("a", PROMPT), num_blocks, cached_tokens)
    assert rig.of(m.RequestFailed)[0].message.startswith(reason)
    assert rig.blocks == {"free": 16}


def test_an_epoch_serves_one_request(engine, spec):
    rig = engine()
    aim(rig, spec("a", PROMPT), 3)
    aim(rig, spec("b", PROMPT), 3)
    assert [
        (failure.request_id, failure.message.split(":")[0]) for failure in rig.of(m.RequestFailed)
    ] == [("b", "target.epoch is in use by another request")]


def test_events_of_unknown_epochs_are_ignored(engine):
    rig = engine()
    rig.transport.cancel(b"unknown")
    rig.transport.fence(b"unknown")
    assert [type(output) for output in rig.step()] == [m.EngineStats]
    assert rig.blocks == {"free": 16}
