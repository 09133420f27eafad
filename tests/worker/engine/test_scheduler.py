"""Continuous batching, seen through what the runner was given [V1]-[V7]."""

from msgspec import structs

from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import SchedulerSettings


def test_prefill_is_cut_into_chunks_of_the_budget(engine, spec):
    """[V2]: 20 tokens under a budget of 8."""
    rig = engine(max_batched_tokens=8)
    rig.serve(spec("a", list(range(20)), max_tokens=2))
    assert rig.runner.executed == [[("a", 8)], [("a", 8)], [("a", 4)], [("a", 1)]]
    assert rig.token_ids("a") == rig.runner.reference(list(range(20)), 2)


def test_decodes_come_first_and_prefill_chunks_fill_the_rest(engine, spec):
    """[V1]: running first, decodes before chunks, then waiting."""
    rig = engine(max_batched_tokens=8)
    rig.handle(m.Submit(spec("a", [1, 2], max_tokens=9)))
    rig.handle(m.Submit(spec("b", list(range(12)))), m.Submit(spec("c", [7, 8, 9])))
    rig.step()
    assert rig.runner.executed[1:] == [[("a", 1), ("b", 7)], [("a", 1), ("b", 5), ("c", 2)]]
    rig.step()
    assert rig.runner.executed[3] == [("a", 1), ("b", 1), ("c", 1)]


def test_a_request_is_admitted_only_when_its_whole_prompt_has_room(engine, spec):
    """[V7]: b needs 3 blocks, 2 are left; it keeps its place in the queue before c."""
    rig = engine(num_blocks=4, max_batched_tokens=8)
    rig.handle(
        m.Submit(spec("a", range(6), max_tokens=2)),
        m.Submit(spec("b", range(50, 60))),
        m.Submit(spec("c", [3])),
    )
    assert rig.runner.executed == [[("a", 6)]]
    rig.run()
    assert list(
        dict.fromkeys(request for batch in rig.runner.executed for request, _ in batch)
    ) == ["a", "b", "c"]


def test_priority_goes_before_arrival(engine, spec):
    """[V6]: lower first, ties by arrival."""
    rig = engine(max_sequences=1)
    for request_id, priority in [("a", 1), ("b", 0), ("c", 0)]:
        rig.core.handle(m.Submit(spec(request_id, priority=priority, max_tokens=1)))
        rig.clock.advance(1)
    rig.run()
    assert [batch[0][0] for batch in rig.runner.executed] == ["b", "c", "a"]


def test_the_earliest_deadline_goes_first_within_a_priority(engine, spec):
    """EDF; a request without a deadline counts as one that has a minute, so that those with one do
    not starve it.
    """
    rig = engine(max_sequences=1)
    requests = [
        ("none", 0, None),
        ("day", 0, 86400.0),
        ("soon", 0, 20.0),
        ("sooner", 0, 5.0),
        ("low", 1, 1.0),
    ]
    for request_id, priority, deadline in requests:
        requested = spec(request_id, priority=priority, max_tokens=1)
        rig.core.handle(m.Submit(structs.replace(requested, deadline_seconds=deadline)))
    rig.run()
    assert [batch[0][0] for batch in rig.runner.executed] == [
        "sooner",
        "soon",
        "none",
        "day",
        "low",
    ]


def test_deadlines_change_nothing_under_fcfs(engine, spec):
    rig = engine(max_sequences=1, scheduler=SchedulerSettings(policy="fcfs"))
    for request_id, deadline in [("first", None), ("second", 1.0)]:
        rig.core.handle(
            m.Submit(structs.replace(spec(request_id, max_tokens=1), deadline_seconds=deadline))
        )
        rig.clock.advance(1)
    rig.run()
    assert [batch[0][0] for batch in rig.runner.executed] == ["first", "second"]


def test_the_last_arrived_is_preempted_recomputed_and_keeps_its_tokens(engine, spec):
    """[V5]: both grow, the pool has one block too few; b starts again with its output as part of
    the prefill.
    """
    rig = engine(num_blocks=5, prefix_caching=False)
    prompts = {"a": list(range(8)), "b": list(range(20, 28))}
    for request_id, prompt in prompts.items():
        rig.core.handle(m.Submit(spec(request_id, prompt, max_tokens=6)))
        rig.clock.advance(1)
    rig.run()
    assert rig.stats.preemptions == 1
    assert [said.request_id for said in rig.outputs if isinstance(said, m.Preempted)] == ["b"]
    # 8 of the prompt, 1 of the output
    assert ("b", 9) in [item for batch in rig.runner.executed for item in batch]
    rig.check(prompts, 6)
    assert rig.tokens("b")[-1].cached_tokens == 0


def test_a_preempted_request_goes_before_those_that_wait(engine, spec):
    """[V5]: back to the front; in a step with a preemption none is admitted [V1]."""
    rig = engine(num_blocks=5, max_sequences=2, prefix_caching=False)
    for request_id, prompt in {"a": range(8), "b": range(20, 28), "c": [5]}.items():
        rig.core.handle(m.Submit(spec(request_id, prompt, max_tokens=6)))
        rig.clock.advance(1)
    rig.run()
    order = [
        request
        for batch in rig.runner.executed
        for request, count in batch
        if count > 1 or request == "c"
    ]
    assert order[:4] == ["a", "b", "b", "c"]


def test_the_worst_priority_is_preempted_even_if_it_came_first(engine, spec):
    """[V5] with [V6]: the victim is the worst (priority, arrival)."""
    rig = engine(num_blocks=5, prefix_caching=False)
    rig.core.handle(m.Submit(spec("low", range(8), max_tokens=6, priority=1)))
    rig.clock.advance(1)
    rig.core.handle(m.Submit(spec("high", range(20, 28), max_tokens=6)))
    rig.run()
    recomputed = [request for batch in rig.runner.executed for request, count in batch if count > 8]
    assert recomputed == ["low"]
    assert rig.token_ids("low") == rig.runner.reference(list(range(8)), 6)


def test_a_prompt_larger_than_the_pool_fails_alone(engine, spec):
    rig = engine(num_blocks=4)
    rig.handle(m.Submit(spec("huge", range(17))), m.Submit(spec("b", [1])))
    rig.run()
    failed = rig.of(m.RequestFailed)
    assert [failure.request_id for failure in failed] == ["huge"]
    assert failed[0].message.startswith("17 tokens do not fit into the KV cache of 16 tokens")
    assert rig.token_ids("b") == rig.runner.reference([1], 3)


def test_a_request_that_outgrows_the_pool_fails_alone_after_what_it_could_say(engine, spec):
    """It neither stops the engine, nor preempts another, nor loops without end."""
    rig = engine(num_blocks=4, max_sequences=2)
    rig.serve(spec("grows", range(14), max_tokens=20))
    # 14 + 3 tokens: the 17th has no slot
    assert rig.token_ids("grows") == rig.runner.reference(list(range(14)), 3)
    assert [failure.request_id for failure in rig.of(m.RequestFailed)] == ["grows"]
    rig.serve(spec("b", [1]))
    assert rig.token_ids("b") == rig.runner.reference([1], 3)
    assert rig.stats.preemptions == 0


def test_has_work_is_false_while_nothing_can_run(engine, spec):
    """Blocks are held for a peer: a loop must sleep, and wake with the abort that frees them."""
    rig = engine(num_blocks=4)
    rig.handle(m.Receive(spec("remote", range(11))))
    rig.handle(m.Submit(spec("waits", range(30, 38))))
    assert not rig.core.has_work
    assert rig.stats.num_waiting == 1
    assert rig.stats.waiting_tokens == 8
    rig.handle(m.Abort("remote"))
    rig.run()
    assert rig.token_ids("waits") == rig.runner.reference(list(range(30, 38)), 3)
