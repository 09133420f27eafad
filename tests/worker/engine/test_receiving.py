"""The decode side of a transfer: room, fence, quarantine, and going on with or without the peer's
KV.
"""

import pytest

from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.requests import Token

PROMPT = list(range(10))  # 3 blocks of 4


def test_remote_prefill_gives_the_tokens_of_a_local_one(pair, spec):
    """T6: the first token comes from the prefill side, the decode side says it never again."""
    both = pair()
    both.start(spec("a", PROMPT, max_tokens=5))
    assert both.decode.blocks == {"free": 13, "receiving": 3}
    both.finish()
    first, rest = both.prefill.token_ids("a"), both.decode.token_ids("a")
    assert first + rest == both.decode.runner.reference(PROMPT, 5)
    assert len(first) == 1
    assert (
        both.decode.stats.bytes_received
        == both.prefill.stats.bytes_sent
        == 3 * both.decode.runner.block_bytes
    )
    assert both.decode.stats.prefill_tokens == 0
    assert set(both.decode.blocks) == {"free", "cached"}


def test_an_aligned_prompt_gets_a_block_for_its_next_token_that_is_not_a_target(pair, spec):
    """ceil((N+1)/block_size) blocks are held, ceil(N/block_size) are written."""
    both = pair()
    ready = both.start(spec("a", range(8)))
    assert len(ready.block_ids) == 2
    assert both.decode.blocks == {"free": 13, "receiving": 2, "in_use": 1}


def test_a_prefix_hit_leaves_only_the_missing_blocks_to_write(pair, spec):
    """T12, [V15]: two of three blocks are here already."""
    both = pair()
    both.decode.handle(m.Submit(spec("before", PROMPT, max_tokens=1)))
    ready = both.start(spec("a", PROMPT, max_tokens=4))
    assert (ready.cached_tokens, len(ready.block_ids)) == (8, 1)
    both.finish()
    assert both.prefill.stats.bytes_sent == both.decode.runner.block_bytes
    both.check(PROMPT, 4)
    assert both.decode.tokens("a")[0].cached_tokens == 8


def test_received_blocks_are_prefix_hits_for_the_next_request(pair, spec):
    both = pair()
    both.start(spec("a", PROMPT))
    both.finish()
    both.decode.handle(m.Submit(spec("b", PROMPT)))
    assert both.decode.tokens("b")[0].cached_tokens == 8


def test_receive_is_refused_without_room_and_leaves_no_trace(engine, spec):
    """T7: b needs 3 blocks and one of headroom for the running request; 16 - 13 are left."""
    rig = engine()
    rig.handle(m.Submit(spec("a", range(50, 99), max_tokens=9)))
    outputs = rig.handle(m.Receive(spec("b", PROMPT)))
    assert m.ReceiveRefused("b", needed_blocks=4) in outputs
    assert "receiving" not in rig.blocks
    rig.handle(m.Abort("a"), m.Receive(spec("b", PROMPT)))
    assert len(rig.of(m.ReceiveReady)) == 1


def test_receive_leaves_room_for_the_first_waiting_request(engine, spec):
    """Else a stream of remote requests would starve a preempted one."""
    rig = engine(num_blocks=6)
    rig.handle(m.Receive(spec("holds", range(60, 70))))
    rig.handle(m.Submit(spec("waits", range(16))))
    rig.handle(m.Receive(spec("late", [1])))
    free = rig.core.pool.num_available
    # asked again at the next change
    assert rig.of(m.ReceiveRefused) == [m.ReceiveRefused("late", needed_blocks=free + 1)]


def test_receive_of_what_can_never_fit_fails(engine, spec):
    """16 known tokens would fit, their next one would not."""
    rig = engine(num_blocks=4)
    rig.handle(m.Receive(spec("a", range(16))))
    assert rig.of(m.RequestFailed)[0].message.startswith("17 tokens do not fit")


def test_failed_receive_is_quarantined_until_its_fence_and_prefilled_here(pair, spec):
    """T4: the block is not reused while a late write may land; the client's token is kept and not
    said again.
    """
    both = pair()
    both.decode.transport.holding = True
    ready = both.start(spec("a", PROMPT, max_tokens=4))
    first = both.prefill.tokens("a")[0]
    both.decode.handle(m.ReceiveFailed("a", ready.epoch, first))
    assert both.decode.blocks == {"free": 10, "quarantined": 3, "in_use": 3}
    both.network.deliver_all()  # late, and lands in quarantined blocks
    both.decode.run()
    assert both.decode.blocks["quarantined"] == 3
    both.decode.transport.settle()
    both.decode.step()
    assert "quarantined" not in both.decode.blocks
    both.check(PROMPT, 4)


def test_failed_receive_without_a_first_token_starts_from_the_prompt(pair, spec):
    both = pair()
    ready = both.start(spec("a", PROMPT, max_tokens=4), prefill_step=False)
    both.decode.handle(m.ReceiveFailed("a", ready.epoch))
    both.decode.run()
    assert both.decode.token_ids("a") == both.decode.runner.reference(PROMPT, 4)
    assert both.decode.stats.prompt_tokens == len(PROMPT)  # counted once, at its first admission


def test_remote_prefill_counts_its_prompt_once_over_both_workers(pair, spec):
    both = pair()
    both.start(spec("a", PROMPT, max_tokens=4))
    both.prefill.serve(spec("own", range(30, 33), max_tokens=1))
    assert both.decode.stats.prompt_tokens == len(PROMPT)
    assert both.prefill.stats.prompt_tokens == 3
    assert both.prefill.stats.prefill_tokens == len(PROMPT) + 3


def test_failed_receive_releases_its_prefix_hits_at_once(pair, spec):
    both = pair()
    both.decode.handle(m.Submit(spec("before", PROMPT, max_tokens=1)))
    both.decode.transport.holding = True
    both.start(spec("a", PROMPT))
    assert both.decode.blocks["in_use"] == 2
    both.decode.handle(m.Abort("a"))
    assert both.decode.blocks == {"free": 13, "cached": 2, "quarantined": 1}


@pytest.mark.parametrize("loss", ["checksum", "missing"])
def test_an_unusable_transfer_is_prefilled_here(pair, spec, loss):
    """A wrong checksum, or a peer that says done before all has arrived."""
    both = pair()
    both.network.corrupt_next = loss == "checksum"
    ready = both.start(spec("a", PROMPT, max_tokens=4))
    first = both.prefill.tokens("a")[0]
    if loss == "checksum":
        both.decode.handle(both.written())
    else:
        both.prefill.transport.deliver()
        both.decode.handle(m.ReceiveDone("a", ready.epoch, first))
    both.decode.run()
    both.check(PROMPT, 4)
    assert both.decode.stats.prefill_tokens == len(PROMPT)


@pytest.mark.parametrize("kind", [m.ReceiveDone, m.ReceiveFailed])
def test_a_first_token_that_ends_the_request_ends_it_here(pair, spec, kind):
    both = pair()
    both.decode.transport.holding = True
    ready = both.start(spec("a", PROMPT))
    both.decode.handle(kind("a", ready.epoch, Token("a", 1, finish_reason="stop")))
    assert both.decode.blocks == {"free": 13, "quarantined": 3}
    both.decode.transport.settle()
    both.decode.step()
    assert both.decode.blocks == {"free": 16}
    assert both.decode.of(m.Tokens) == []


@pytest.mark.parametrize("kind", [m.ReceiveDone, m.ReceiveFailed])
def test_a_stale_word_about_a_transfer_is_ignored(pair, spec, kind):
    """Another epoch, an unknown request, and a second word after the first."""
    both = pair()
    token = Token("a", 1)
    both.decode.transport.holding = True
    ready = both.start(spec("a", PROMPT))
    both.decode.handle(kind("a", bytes(16), token), kind("b", ready.epoch, token))
    assert both.decode.blocks["receiving"] == 3
    both.decode.handle(m.ReceiveDone("a", ready.epoch, token), kind("a", ready.epoch, token))
    assert both.decode.blocks["receiving"] == 3


def test_abort_between_done_and_fence_frees_after_the_fence(pair, spec):
    """[V12] in the state between the peer's word and the fence."""
    both = pair()
    both.decode.transport.holding = True
    both.start(spec("a", PROMPT))
    both.decode.handle(both.written())
    both.decode.handle(m.Abort("a"))
    assert both.decode.blocks == {"free": 13, "quarantined": 3}
    both.decode.transport.settle()
    both.decode.step()
    assert both.decode.blocks == {"free": 16}


def test_a_received_request_waits_for_a_seat_with_its_kv(pair, spec):
    """It is first when a seat is free, and nothing is computed twice."""
    both = pair(decode={"max_sequences": 1})
    both.start(spec("a", PROMPT, max_tokens=4))
    both.decode.handle(m.Submit(spec("running", [1], max_tokens=9)), m.Submit(spec("waiting", [2])))
    both.clock.advance(1)
    both.decode.handle(both.written())
    assert both.decode.stats.num_waiting == 2
    both.decode.run()
    items = [item for batch in both.decode.runner.executed for item in batch]
    assert list(dict.fromkeys(name for name, _ in items)) == ["running", "a", "waiting"]
    assert items.count(("a", 1)) == 3
    assert all(count == 1 for _, count in items)


def test_a_received_request_that_waits_for_a_seat_can_be_preempted(pair, spec):
    """Running ones grow first; it is recomputed and gives the same answer."""
    both = pair(decode={"max_sequences": 1, "num_blocks": 5, "prefix_caching": False})
    both.decode.handle(m.Submit(spec("running", [1], max_tokens=12)))
    both.clock.advance(1)
    both.start(spec("a", PROMPT, max_tokens=4))
    both.finish()
    assert both.decode.stats.preemptions == 1
    assert both.decode.token_ids("running") == both.decode.runner.reference([1], 12)
    both.check(PROMPT, 4)


def test_an_overdue_fence_is_counted_and_its_blocks_stay_quarantined(pair, spec):
    both = pair(decode={"fence_timeout_seconds": 5.0})
    both.decode.transport.holding = True
    both.start(spec("a", PROMPT))
    assert both.decode.core.next_wake_seconds() is None
    both.decode.handle(m.Abort("a"))
    assert both.decode.core.next_wake_seconds() == 5.0
    both.clock.advance(5.0)
    both.decode.step()
    assert both.decode.stats.fences_overdue == 1
    assert both.decode.blocks["quarantined"] == 3
    assert both.decode.core.next_wake_seconds() is None
    both.decode.transport.settle()
    both.decode.step()
    assert both.decode.stats.fences_overdue == 0
    assert both.decode.blocks == {"free": 16}
