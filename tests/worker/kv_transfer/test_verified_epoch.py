"""An epoch that is verified where engine.verifyTransfers is off; others beside it have no
checksum.
"""

from pdcluster_worker.engine.ports import Fenced
from tests.worker.kv_transfer.conftest import MakePair

VERIFIED, OTHER = bytes(16), bytes([1]) * 16


def test_verified_epoch_has_a_checksum_and_others_have_none(make_pair: MakePair) -> None:
    prefill, decode = make_pair(verify=False)
    for epoch, target, verify in ((VERIFIED, 3, True), (OTHER, 4, False)):
        decode.transport.open(epoch, [target], verify=verify)
        to = decode.engine_id, [decode.address] if decode.transport.ports[0] else [""]
        prefill.transport.write(epoch, *to, [(0, target)], verify=verify)
    prefill.wait_sent(2)
    sent = prefill.transport.checksum(VERIFIED)
    for epoch in (VERIFIED, OTHER):
        decode.transport.fence(epoch)
    fenced = {event.epoch: event for event in decode.wait_for(Fenced, 2)}

    assert sent is not None
    assert fenced[VERIFIED].checksum == sent
    assert (prefill.transport.checksum(OTHER), fenced[OTHER].checksum) == (None, None)
