"""Hashes, hits and block events [V14], [V15], [V19]."""

from msgspec.structs import replace

from pdcluster_worker.engine import block_pool
from pdcluster_worker.engine.block_pool import PrefixCache
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.block_hash import block_hashes


def test_events_are_net_changes_in_order():
    """[V19]: what was stored and dropped between two reports is not said at all."""
    cache = PrefixCache()
    for block, block_hash in enumerate([b"a", b"b", b"c"]):
        cache.insert(block, block_hash)
    cache.drop(1)
    assert cache.take_events() == m.BlockEvents(stored=[b"a", b"c"], removed=[], sequence=1)
    cache.drop(2)
    cache.drop(0)
    cache.insert(9, b"a")
    assert cache.take_events() == m.BlockEvents(stored=[], removed=[b"c"], sequence=2)
    assert cache.take_events() is None


def test_everything_is_reported_again_under_the_next_number():
    """[V19]: what changes before it goes out is in it, and later changes are reported as before."""
    cache = PrefixCache()
    for block, block_hash in enumerate([b"a", b"b", b"c"]):
        cache.insert(block, block_hash)
    cache.take_events()
    cache.drop(0)
    cache.begin_snapshot()
    cache.drop(1)
    cache.insert(4, b"d")
    assert cache.take_events() == m.BlockEvents([b"c", b"d"], [], sequence=2, is_cleared=True)
    cache.drop(4)
    assert cache.take_events() == m.BlockEvents([], [b"d"], sequence=3)
    cache.drop(2)
    cache.begin_snapshot()
    assert cache.take_events() == m.BlockEvents([], [], sequence=4, is_cleared=True)
    assert cache.take_events() is None


def test_more_hashes_than_a_message_takes_are_reported_in_parts(monkeypatch):
    monkeypatch.setattr(block_pool, "MOST_HASHES", 3)
    cache = PrefixCache()
    for block, block_hash in enumerate([b"a", b"b", b"c", b"d"]):
        cache.insert(block, block_hash)
    cache.begin_snapshot()
    assert cache.take_events() == m.BlockEvents([b"a", b"b", b"c"], [], 1, is_cleared=True)
    assert cache.has_events
    cache.drop(0)
    cache.drop(3)  # its part has not been sent
    assert cache.take_events() == m.BlockEvents([], [b"a"], sequence=2)
    assert not cache.has_events


def test_engine_reports_its_whole_cache_on_request(engine, spec):
    """[V19]."""
    rig = engine()
    rig.handle(m.Submit(spec("a", list(range(9)), max_tokens=1)))
    rig.handle(m.AskSnapshot())
    assert rig.of(m.BlockEvents)[1:] == [
        m.BlockEvents(block_hashes(list(range(9)), 4), [], sequence=2, is_cleared=True)
    ]


def test_a_repeated_prompt_hits_all_but_the_block_of_its_last_token(engine, spec):
    """[V15]: an aligned prompt of 8 tokens reuses one block of two, so that one token is always
    computed.
    """
    rig = engine()
    prompt = list(range(8))
    for request_id in "ab":
        rig.serve(spec(request_id, prompt))
    assert rig.tokens("a")[0].cached_tokens == 0
    assert rig.tokens("b")[0].cached_tokens == 4
    assert rig.token_ids("a") == rig.token_ids("b") == rig.runner.reference(prompt, 3)
    assert (rig.stats.prefix_query_tokens, rig.stats.prefix_hit_tokens) == (16, 4)


def test_output_blocks_are_cached_too(engine, spec):
    """A follow-up that sends prompt and answer again reuses the blocks of both."""
    rig = engine()
    rig.serve(spec("a", [1, 2, 3], max_tokens=7))
    rig.handle(m.Submit(spec("b", [1, 2, 3, *rig.token_ids("a")])))
    assert rig.tokens("b")[0].cached_tokens == 8


def test_without_prefix_caching_nothing_is_hashed_or_hit(engine, spec):
    rig = engine(prefix_caching=False)
    for request_id in "ab":
        rig.serve(spec(request_id, list(range(8))))
    assert rig.tokens("b")[0].cached_tokens == 0
    assert rig.of(m.BlockEvents) == []
    assert rig.blocks == {"free": 16}


def test_two_requests_share_the_blocks_of_a_running_one(engine, spec):
    rig = engine(num_blocks=7)
    rig.handle(m.Submit(spec("a", list(range(16)), max_tokens=4)))
    rig.handle(m.Submit(spec("b", [*range(12), 99], max_tokens=2)))
    assert rig.tokens("b")[0].cached_tokens == 12
    rig.run()
    assert rig.token_ids("b") == rig.runner.reference([*range(12), 99], 2)


def test_a_prompt_hits_the_blocks_of_its_own_salt_only(engine, spec):
    rig = engine()
    prompt = list(range(9))
    salts = {"a": b"a" * 32, "b": b"b" * 32, "none": b"", "again": b"a" * 32}
    for request_id, salt in salts.items():
        rig.handle(m.Submit(replace(spec(request_id, prompt), cache_salt=salt)))
        rig.run()
    assert {name: rig.tokens(name)[0].cached_tokens for name in salts} == {
        "a": 0,
        "b": 0,
        "none": 0,
        "again": 8,
    }
