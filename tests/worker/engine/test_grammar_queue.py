"""Requests whose constraint is being compiled wait for it alone; a constraint that cannot be
compiled ends its request alone [V31].
"""

import pytest

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.requests import Constraint

FORM = Constraint("regex", "form")


def constrained(spec, name, **options):
    return spec(name, constraint=FORM, **options)


def test_a_request_waits_for_its_grammar_and_others_do_not(engine, spec):
    rig = engine()
    rig.handle(m.Submit(constrained(spec, "waits")), m.Submit(spec("goes on")))
    rig.run()

    assert len(rig.token_ids("goes on")) == 3
    assert rig.token_ids("waits") == []
    # it holds none
    assert rig.blocks == {"free": rig.settings.num_blocks} or "in_use" not in rig.blocks
    assert not rig.core.has_work  # the loop sleeps until it is woken
    assert rig.stats.num_waiting == 1

    rig.runner.grammars.compiled.add("form")
    rig.step()
    rig.run()
    assert len(rig.token_ids("waits")) == 3
    assert rig.stats.num_waiting == 0


def test_a_compiled_grammar_is_not_waited_for(engine, spec):
    rig = engine()
    rig.runner.grammars.compiled.add("form")
    rig.handle(m.Submit(constrained(spec, "a")))

    assert len(rig.token_ids("a")) == 1
    assert rig.runner.grammars.begun == ["form"]


def test_a_constraint_that_cannot_be_compiled_is_a_refusal_of_its_request(engine, spec):
    rig = engine()
    rig.runner.grammars.wrong["form"] = RequestError("#/type: no", param="constraint")
    rig.handle(m.Submit(constrained(spec, "wrong")), m.Submit(spec("right")))
    rig.run()

    assert rig.of(m.RequestFailed) == [
        m.RequestFailed("wrong", "#/type: no", is_refusal=True, param="constraint")
    ]
    assert len(rig.token_ids("right")) == 3


def test_an_aborted_request_waits_no_longer(engine, spec):
    rig = engine()
    rig.handle(m.Submit(constrained(spec, "a")))
    rig.handle(m.Abort("a"))
    rig.runner.grammars.compiled.add("form")
    rig.step()
    rig.run()

    assert rig.token_ids("a") == []
    assert rig.stats.num_waiting == 0


@pytest.mark.parametrize("late", [True, False])
def test_a_received_request_waits_for_its_kv_and_its_grammar(pair, spec, late):
    """late: the grammar is compiled after the KV has come."""
    both = pair()
    request = constrained(spec, "a")
    both.prefill.runner.grammars.compiled.add("form")
    both.start(request)
    if not late:
        both.decode.runner.grammars.compiled.add("form")
        both.decode.step()
        assert both.decode.token_ids("a") == []
    both.finish()
    if late:
        assert both.decode.token_ids("a") == []
        both.decode.runner.grammars.compiled.add("form")
        both.decode.step()
        both.decode.run()

    both.check(request.prompt, 3)


@pytest.mark.parametrize("late", [True, False])
def test_a_request_that_lost_its_peer_waits_for_its_grammar_too(pair, spec, late):
    both = pair()
    request = constrained(spec, "a")
    ready = both.start(request, prefill_step=False)
    both.decode.handle(m.ReceiveFailed("a", ready.epoch))
    if late:
        both.decode.run()
        assert both.decode.token_ids("a") == []
    both.decode.runner.grammars.compiled.add("form")
    both.decode.step()
    both.decode.run()

    assert both.decode.token_ids("a") == both.decode.runner.reference(request.prompt, 3)


def test_a_request_whose_constraint_is_wrong_gives_up_the_blocks_that_it_receives_into(pair, spec):
    both = pair()
    both.start(constrained(spec, "a"), prefill_step=False)
    both.decode.runner.grammars.wrong["form"] = RequestError("no")
    both.decode.step()
    both.decode.step()

    assert [failed.request_id for failed in both.decode.of(m.RequestFailed)] == ["a"]
    assert set(both.decode.blocks) <= {"free", "cached"}
