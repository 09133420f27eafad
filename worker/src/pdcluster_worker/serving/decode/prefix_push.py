"""KV of a prefix that this decode worker holds, written to the prefill worker that lacks it."""

import logging

import msgspec

from pdcluster_worker.errors import PeerError, RequestError
from pdcluster_worker.messages.engine import Prefill, PrefillDone, ReceiveReady
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams, Token, TransferTarget
from pdcluster_worker.peers.client import Peer
from pdcluster_worker.routing.attempts import pushes_prefix
from pdcluster_worker.serving.engines.engines import RequestHandle
from pdcluster_worker.serving.worker_context import WorkerContext
from pdcluster_worker.tracing.request_trace import add_event

logger = logging.getLogger(__name__)

_TWO_TOKENS = SamplingParams(max_tokens=2, seed=0, temperature=0.0, ignore_eos=True)
"""With the first the giver's KV is sent; with the second the prefix is in the taker's cache."""


async def push_prefix(
    worker: WorkerContext, place: RequestHandle, peer: Peer, spec: RequestSpec, blocks: ReceiveReady
) -> None:
    """Give what the peer lacks of the prefix that is cached here, if that is worth it."""
    held, hashes = blocks.cached_tokens, worker.hashes(spec)
    lacking = held - peer.prefix_match(hashes) * worker.block_size
    has_kv_port = bool(place.engine.kv_addresses)  # a stock engine has none of ours
    if (
        not has_kv_port
        or spec.verify_transfer
        or not pushes_prefix(
            lacking,
            worker.transfer_seconds(peer.key, lacking),
            worker.prefill_rates.seconds(peer.key, lacking),
        )
    ):
        return
    tokens = [*spec.prompt, *spec.output][:held]
    prefix = msgspec.structs.replace(
        spec,
        request_id=f"{spec.request_id}~prefix",
        prompt=tokens,
        output=[],
        sampling=_TWO_TOKENS,
    )
    outcome = "failed"
    try:
        is_taken = await peer.push(
            prefix, lambda target: _push_blocks(worker, place, prefix, target)
        )
        outcome = "ok" if is_taken else "refused"
    except (PeerError, RequestError) as e:
        logger.warning(
            "prefix was not given request=%s peer=%s reason=%s", spec.request_id, peer.key, e
        )
    finally:
        worker.metrics.kv_prefixes_given.labels(outcome).inc()
        add_event("gives_prefix", peer=peer.key, tokens=lacking, outcome=outcome)


async def _push_blocks(
    worker: WorkerContext, place: RequestHandle, prefix: RequestSpec, target: TransferTarget
) -> tuple[Token, PrefillDone]:
    """Write it by the engine that holds it: a prefill whose blocks are all cached but the last."""
    own = RequestHandle(place.engine, place.engine.client.open(prefix.request_id))
    try:
        own.send(Prefill(prefix, target))
        first, done = await own.mailbox.get(), await own.mailbox.get()
    finally:
        own.close()
    if not isinstance(first, Token) or not isinstance(done, PrefillDone):
        raise RequestError("the engine did not write the prefix", status=500)
    worker.note_transfer(done)
    return first, done
