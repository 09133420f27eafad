"""Models whose every layer has a window [V17]: blocks that have left it are free, tokens right.

`FakeRunner` derives each token from its window, and asserts that none sees the null block.
"""

import pytest

from pdcluster_worker.engine.block_pool import PrefixCache
from pdcluster_worker.engine.block_table import most_blocks
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.block_hash import block_hashes

WINDOW = {"window": 6, "max_batched_tokens": 8, "max_model_len": 1000}
PROMPT = list(range(40))


def test_blocks_that_left_the_window_are_free_and_null_in_the_table(engine, spec):
    rig = engine(**WINDOW, prefix_caching=False)
    rig.handle(m.Submit(spec("a", PROMPT, max_tokens=30)))
    request = rig.core._requests["a"]
    null, held = rig.settings.null_block, []
    while rig.core.has_work:
        table, computed = request.block_table, request.num_computed_tokens
        live = [block for block in table if block != null]
        assert table[: len(table) - len(live)] == [null] * (len(table) - len(live))
        assert (len(table) - len(live)) == max(0, computed - 5) // 4
        assert rig.blocks.get("in_use", 0) == len(live)
        held.append(len(live))
        rig.step()
    assert rig.token_ids("a") == rig.runner.reference(PROMPT, 30)
    assert max(held) <= most_blocks(1000, rig.settings) == 4
    assert rig.blocks == {"free": 16}


def test_prompt_larger_than_the_pool_runs_where_its_window_fits(engine, spec):
    """[V7]: admission asks for the largest chunk and the window before it."""
    rig = engine(num_blocks=4, **WINDOW)
    rig.serve(spec("a", PROMPT, max_tokens=20))
    assert rig.token_ids("a") == rig.runner.reference(PROMPT, 20)
    assert rig.stats.preemptions == 0


def test_window_larger_than_the_pool_is_refused_with_the_numbers(engine, spec):
    rig = engine(num_blocks=3, **WINDOW)
    rig.handle(m.Submit(spec("a", PROMPT)))
    (failed,) = rig.of(m.RequestFailed)
    assert (
        "40 tokens do not fit into the KV cache of 12 tokens: they need 4 blocks at once of 3"
        in failed.message
    )


def test_prefills_never_lack_a_block_that_was_promised(engine, spec):
    """[V7]: growing decodes and shared hits take nothing of what was promised."""
    rig = engine(num_blocks=11, max_sequences=4, **WINDOW)
    prompts = {"a": PROMPT, "b": PROMPT[:12], "c": PROMPT, "d": [*PROMPT[:20], 99, 98]}
    for name, prompt in prompts.items():
        rig.handle(m.Submit(spec(name, prompt, max_tokens=25)))
    rig.run(2000)
    rig.check(prompts, 25)


def test_hit_needs_the_blocks_of_the_last_window_only():
    cache = PrefixCache()
    hashes = [b"a", b"b", b"c", b"d", b"e"]
    for block, block_hash in ((1, b"b"), (2, b"c"), (4, b"e")):
        cache.insert(block, block_hash)
    assert cache.match_last(hashes, 5, 1) == (4, [4])
    assert cache.match_last(hashes, 5, 2) == (1, [1, 2])
    assert cache.match_last(hashes, 5, 3) == (0, [])
    cache.insert(0, b"a")
    assert cache.match_last(hashes, 5, 3) == (0, [0, 1, 2])
    assert cache.match_last(hashes, 5, 4) == (0, [0, 1, 2])  # all there are, from the beginning
    assert cache.match_last(hashes, 2, 2) == (0, [0, 1])


def test_prompt_is_found_again_by_its_last_window(engine, spec):
    """[V15]: and its first blocks may be gone."""
    rig = engine(**WINDOW)
    rig.serve(spec("a", PROMPT, max_tokens=1))
    pool = rig.core.pool
    taken = pool.allocate(pool.counts()["free"] + 4)  # the four that were given back first
    assert pool.prefix_cache.match(block_hashes(PROMPT, 4), 9) == []
    pool.release(taken)
    rig.serve(spec("b", PROMPT, max_tokens=3))
    assert rig.tokens("b")[0].cached_tokens == 36
    assert rig.token_ids("b") == rig.runner.reference(PROMPT, 3)


def test_every_hash_names_a_block_with_its_tokens(engine, spec):
    """A block that is given back keeps the hash of what it holds, until it is taken again [V16]."""
    rig = engine(num_blocks=9, **WINDOW)
    for number in range(4):
        prompt = [*PROMPT[: 10 * number], *range(100 * number, 100 * number + 30)]
        rig.handle(m.Submit(spec(f"r{number}", prompt, max_tokens=9)))
        rig.run(500)
        assert rig.token_ids(f"r{number}") == rig.runner.reference(prompt, 9)
    known = {}
    for number in range(4):
        prompt = [*PROMPT[: 10 * number], *range(100 * number, 100 * number + 30)]
        tokens = [*prompt, *rig.token_ids(f"r{number}")]
        known |= {h: tokens[4 * i : 4 * i + 4] for i, h in enumerate(block_hashes(tokens, 4))}
    cache = rig.core.pool.prefix_cache
    assert len(cache) > 3
    for block, block_hash in cache._hashes.items():
        stored = list(rig.runner.block(block).cast("q"))
        tokens = known[block_hash]
        assert all(value % (token + 1) == 0 for value, token in zip(stored, tokens, strict=True))


@pytest.mark.parametrize("length", [3, 12, 13, 40])
def test_transfer_moves_the_last_window_only(pair, spec, length):
    """The decode side holds no block before the window of the next token, and none is sent."""
    both = pair(decode=WINDOW, prefill=WINDOW)
    prompt = PROMPT[:length]
    ready = both.start(spec("a", prompt, max_tokens=12))
    first = max(0, length - 5) // 4
    assert ready.cached_tokens == 4 * first
    assert len(ready.block_ids) == -(-length // 4) - first
    assert both.decode.blocks["receiving"] == len(ready.block_ids)
    both.finish()
    both.check(prompt, 12)
    assert both.decode.blocks.keys() <= {"free", "cached"} >= both.prefill.blocks.keys()


def test_transfer_after_a_hit_in_the_window_moves_what_is_missing(pair, spec):
    both = pair(decode=WINDOW, prefill=WINDOW)
    both.decode.serve(spec("b", PROMPT[:37], max_tokens=1))
    ready = both.start(spec("a", PROMPT, max_tokens=3))
    assert (ready.cached_tokens, len(ready.block_ids)) == (36, 1)
    assert both.decode.core._requests["a"].num_cached_tokens == 36


def test_request_whose_transfer_fails_is_computed_here_from_its_beginning(pair, spec):
    both = pair(decode=WINDOW, prefill=WINDOW)
    ready = both.start(spec("a", PROMPT, max_tokens=5))
    both.decode.handle(m.ReceiveFailed("a", ready.epoch))
    both.decode.run()
    assert both.decode.token_ids("a") == both.decode.runner.reference(PROMPT, 5)
    assert both.decode.blocks.keys() <= {"free", "cached"}


def test_prefill_for_a_peer_that_asks_for_more_than_the_window_holds_all_of_it(pair, spec):
    """Blocks that are to be sent stay held, whatever has left the window."""
    both = pair(decode={**WINDOW, "window": None}, prefill=WINDOW)
    both.decode.runner._window = WINDOW["window"]
    ready = both.start(spec("a", PROMPT, max_tokens=5))
    assert len(ready.block_ids) == 10
    both.finish()
    both.check(PROMPT, 5)


def test_without_a_window_nothing_is_given_back_early(engine, spec):
    """A model with any layer that sees everything keeps all its blocks."""
    rig = engine(max_batched_tokens=8)
    rig.handle(m.Submit(spec("a", PROMPT, max_tokens=9)))
    for _ in range(8):
        rig.step()
    request = rig.core._requests["a"]
    assert (request.num_null_blocks, len(set(request.block_table))) == (0, len(request.block_table))
