"""KV of a prefix that a decode worker holds and this prefill worker lacks: read before the prefill.

The engine receives it as it would for a request of its own, makes one token after it, and keeps the
blocks in its prefix cache, where the prefill that follows finds them.  What the giver does is
`serving.decode.prefix_push`'s.

Blocks wait for a giver for a bounded time: one that has hung may still hold its connection.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.engine import PrefillDone, ReceiveDone, ReceiveRefused
from pdcluster_worker.messages.requests import RequestSpec, Token, TransferTarget
from pdcluster_worker.routing.migration import PUSH_SECONDS
from pdcluster_worker.serving.worker_context import WorkerContext


async def receive_prefix(
    worker: WorkerContext,
    spec: RequestSpec,
    given: Callable[[], Awaitable[tuple[Token, PrefillDone]]],
) -> AsyncGenerator[TransferTarget, None]:
    """The blocks that the prefix is to be written to; none where there is no room for it now.

    given: waits until it is written.  Closing the iterator gives the blocks up, and so does an
           error: RequestError after PUSH_SECONDS.
    """
    with worker.request():
        place = worker.engines.open(spec.request_id, lambda: worker.hashes(spec))
        try:
            blocks = await place.receive(spec)
            if isinstance(blocks, ReceiveRefused):
                return
            yield place.target(blocks)
            first, done = await _in_time(given())
            place.send(ReceiveDone(spec.request_id, blocks.epoch, first, done.checksum))
            await place.mailbox.token()
            worker.metrics.kv_prefixes_taken.inc()
        finally:
            place.close()


async def _in_time(given: Awaitable[tuple[Token, PrefillDone]]) -> tuple[Token, PrefillDone]:
    try:
        async with asyncio.timeout(PUSH_SECONDS) as limit:
            return await given
    except TimeoutError as e:
        late = f"the giver has not written the prefix within {PUSH_SECONDS:g} s"
        message = late if limit.expired() else f"the giver timed out: {e or 'it says no more'}"
        raise RequestError(message, status=503, code="prefix_not_given") from e
