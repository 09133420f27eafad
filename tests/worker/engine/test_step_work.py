"""Work of a step, by kind: prefilled, decoded, and computed again after a preemption."""

from pdcluster_worker.messages import engine as m


def test_batches_tell_requests_and_tokens_by_kind(engine, spec):
    rig = engine(max_batched_tokens=8)
    rig.serve(spec("a", list(range(12)), max_tokens=3))
    batches = [batch for stats in rig.of(m.EngineStats) for batch in stats.batches]
    assert batches == [(1, 8, 0, 0), (1, 4, 0, 0), (1, 0, 1, 0), (1, 0, 1, 0)]


def test_tokens_that_a_preemption_lost_are_recomputed_ones(engine, spec):
    """Each token of a request is new once; whatever is computed beyond that is recomputed."""
    rig = engine(num_blocks=7, prefix_caching=False, max_batched_tokens=64)
    prompts = {"a": list(range(9)), "b": list(range(50, 59))}
    for name, prompt in prompts.items():
        rig.handle(m.Submit(spec(name, prompt, max_tokens=10)))
    rig.run()
    batches = [batch for stats in rig.of(m.EngineStats) for batch in stats.batches]
    num_new = sum(prefilled + decoded for _, prefilled, decoded, _ in batches)
    assert rig.stats.preemptions == 1
    assert num_new == 2 * (9 + 10 - 1)  # the last token is never computed
    assert sum(recomputed for *_, recomputed in batches) > 9
    assert sum(sum(tokens) for _, *tokens in batches) == sum(
        count for step in rig.runner.executed for _, count in step
    )


def test_a_prefix_that_is_found_again_is_not_recomputed(engine, spec):
    rig = engine(num_blocks=7, max_batched_tokens=64)
    for name, prompt in {"a": list(range(9)), "b": list(range(50, 59))}.items():
        rig.handle(m.Submit(spec(name, prompt, max_tokens=10)))
    rig.run()
    recomputed = sum(batch[3] for stats in rig.of(m.EngineStats) for batch in stats.batches)
    assert rig.stats.preemptions >= 1
    assert recomputed <= 9


def test_transfer_that_fails_makes_nothing_recomputed(pair, spec):
    """Tokens that a peer was to compute were never computed here."""
    both = pair()
    ready = both.start(spec("a", list(range(10)), max_tokens=2))
    both.decode.handle(m.ReceiveFailed("a", ready.epoch))
    both.decode.run()
    assert [batch for stats in both.decode.of(m.EngineStats) for batch in stats.batches] == [
        (1, 10, 0, 0),
        (1, 0, 1, 0),
    ]


def test_evictions_count_cached_blocks_that_were_taken(engine, spec):
    """[V16]."""
    rig = engine(num_blocks=3)
    for start in (0, 100, 200):
        rig.serve(spec(f"r{start}", list(range(start, start + 9)), max_tokens=1))
    assert rig.stats.evictions == 4
