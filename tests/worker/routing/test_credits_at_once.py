"""`grants_at_once` foresees the answer of a claim."""

from hypothesis import given
from hypothesis import strategies as st

from pdcluster_schema.routing import PrefillQueueSpec
from pdcluster_worker.routing.batching import Grant
from pdcluster_worker.routing.credits import CreditLedger

claims = st.lists(st.tuples(st.integers(1, 200), st.booleans()), max_size=20)


@given(given_claims=claims, is_stopped=st.booleans())
def test_a_claim_is_granted_as_foreseen(given_claims: list[tuple[int, bool]], is_stopped: bool):
    ledger = CreditLedger(256)
    for number, (tokens, is_finished) in enumerate(given_claims):
        if is_stopped and number == len(given_claims) - 1:
            ledger.stop()
        foreseen = ledger.grants_at_once(tokens)
        granted = ledger.claim("d", str(number), tokens, 0)
        assert foreseen == (Grant("d", str(number)) in granted)
        if foreseen and is_finished:
            ledger.start("d", str(number))
            ledger.finish("d", str(number))


def test_a_batch_window_grants_nothing_at_once():
    ledger = CreditLedger(256)
    ledger.set_policy(PrefillQueueSpec(mode="throughputFirst"), 256)

    assert not ledger.grants_at_once(1)
