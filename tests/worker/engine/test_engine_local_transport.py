"""Two cores over the real in-process transport: remote equals local, with checksums on."""

import pytest

from pdcluster_worker.engine.core import EngineCore
from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.engine_settings import EngineSettings
from pdcluster_worker.messages.requests import TransferTarget
from pdcluster_worker.testing import FakeClock, FakeRunner
from pdcluster_worker.testing.local_transport import LocalFabric, LocalTransport


@pytest.mark.parametrize("lost", [False, True], ids=["delivered", "lost"])
@pytest.mark.parametrize("num_tokens", [1, 4, 7, 8, 9, 16, 33])
def test_remote_prefill_over_the_local_transport(spec, num_tokens, lost):
    """T6 at lengths around block and chunk edges; a lost block means a local prefill and the same
    tokens.
    """
    fabric = LocalFabric(deferred=True)
    sizes = EngineSettings(
        block_size=4, num_blocks=16, max_batched_tokens=8, max_sequences=4, max_model_len=100
    )
    runners = [FakeRunner(16, 4), FakeRunner(16, 4)]
    clock = FakeClock()
    transports = [
        LocalTransport(fabric, [runner], name, verify=True, clock=clock)
        for runner, name in zip(runners, "dp", strict=True)
    ]
    decode, prefill = (
        EngineCore(sizes, runner, transport, clock)
        for runner, transport in zip(runners, transports, strict=True)
    )
    request = spec("a", list(range(num_tokens)), max_tokens=6)

    decode.handle(m.Receive(request))
    ready = next(output for output in decode.step() if isinstance(output, m.ReceiveReady))
    prefill.handle(
        m.Prefill(
            request,
            TransferTarget(ready.epoch, "d", ["nowhere"], ready.cached_tokens, ready.block_ids),
        )
    )
    said = []
    while prefill.has_work:
        said += prefill.step()
    first = next(output for output in said if isinstance(output, m.Tokens)).tokens[0]
    if lost:
        fabric.drop_next()
    while fabric.deliver_next():
        pass
    end = next(
        output for output in prefill.step() if isinstance(output, m.PrefillDone | m.PrefillFailed)
    )
    if isinstance(end, m.PrefillDone):
        decode.handle(m.ReceiveDone("a", ready.epoch, first, end.checksum))
    else:
        decode.handle(m.ReceiveFailed("a", ready.epoch, first))
    answer = [first.token_id]
    while True:
        answer += [
            token.token_id
            for output in decode.step()
            if isinstance(output, m.Tokens)
            for token in output.tokens
        ]
        if not decode.has_work:
            break

    assert isinstance(end, m.PrefillFailed) == lost
    assert answer == runners[0].reference(request.prompt, 6)
    for core in (decode, prefill):
        core.check()
        counts = core.pool.counts()
        assert counts["free"] + counts["cached"] == 16
