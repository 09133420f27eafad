"""Report of a transfer with `verify_transfer`; there is none of others."""

import pytest
from msgspec.structs import replace

from pdcluster_worker.messages import engine as m

PROMPT = list(range(10))  # 3 blocks of 4


@pytest.fixture
def unverified(pair):
    """A pair of engines whose engine.verifyTransfers is off."""
    both = pair()
    both.decode.transport.verify = both.prefill.transport.verify = False
    return both


def run_remote(both, request):
    """The whole remote prefill of one request, and its tokens here."""
    both.start(request)
    both.finish()


def test_verified_transfer_is_reported_before_the_tokens_that_follow_it(unverified, spec):
    both = unverified
    run_remote(both, replace(spec("a", PROMPT, max_tokens=4), verify_transfer=True))

    said = [output for output in both.decode.outputs if isinstance(output, m.Received | m.Tokens)]
    assert said[0] == m.Received(
        "a", len(PROMPT), 3, 3 * both.decode.runner.block_bytes, is_intact=True
    )


def test_damaged_block_is_reported_and_the_prompt_computed_here(unverified, spec):
    both = unverified
    both.network.corrupt_next = True
    run_remote(both, replace(spec("a", PROMPT, max_tokens=4), verify_transfer=True))

    (received,) = both.decode.of(m.Received)
    assert (received.num_tokens, received.is_intact) == (0, False)
    assert both.decode.stats.prefill_tokens == len(PROMPT)


def test_other_transfers_are_neither_verified_nor_reported(unverified, spec):
    both = unverified
    run_remote(both, spec("a", PROMPT, max_tokens=4))

    assert both.prefill.of(m.PrefillDone)[-1].checksum is None
    assert both.decode.of(m.Received) == []


def test_peer_without_checksums_leaves_it_open(unverified, spec):
    """As a prefill worker of an older image, which does not know the field."""
    both = unverified
    both.start(replace(spec("a", PROMPT, max_tokens=4), verify_transfer=True))
    both.decode.handle(replace(both.written(), checksum=None))
    both.decode.run()

    (received,) = both.decode.of(m.Received)
    assert (received.num_tokens, received.is_intact) == (len(PROMPT), None)


def test_prompt_of_a_verification_is_none_of_a_client(unverified, spec):
    both = unverified
    verification = replace(spec("a", PROMPT, max_tokens=4), verify_transfer=True)
    run_remote(both, verification)
    both.decode.handle(m.Submit(replace(verification, request_id="b")))
    both.decode.run()
    assert both.decode.stats.prompt_tokens == 0

    run_remote(both, spec("c", PROMPT, max_tokens=4))
    assert both.decode.stats.prompt_tokens == len(PROMPT)
