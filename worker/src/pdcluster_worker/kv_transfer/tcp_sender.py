"""Gives each peer that is written to one thread with one connection (`kv_transfer.tcp_link`).

A connection that fails ends every slice with work under way on it, with the
reason, and its thread; the next write to that peer starts another.  Other
peers are not affected.  An engine that restarts has a new engine_id and is
another peer, whatever its address.
"""

import logging
import threading
import time
from collections.abc import Sequence

from pdcluster_worker.engine.ports import KVMemory
from pdcluster_worker.errors import PeerError
from pdcluster_worker.kv_transfer import sockets
from pdcluster_worker.kv_transfer.head_shards import HeadShard
from pdcluster_worker.kv_transfer.outbox import Outbox, PeerAddress
from pdcluster_worker.kv_transfer.tcp_link import Link, LinkSettings, Stopped

logger = logging.getLogger(__name__)

JOIN_SECONDS = 5.0


class TcpSender:
    """The engine thread's side of the links."""

    def __init__(self, outbox: Outbox, memory: KVMemory, settings: LinkSettings) -> None:
        self._outbox = outbox
        self._memory = memory
        self._settings = settings
        self._lock = threading.Lock()
        self._links: dict[PeerAddress, tuple[Link, threading.Thread]] = {}

    def write(
        self, part: HeadShard, peer: PeerAddress, pairs: Sequence[tuple[int, int]], *, verify: bool
    ) -> None:
        """Queue, and wake or start the peer's thread."""
        with self._lock:
            self._outbox.write(part, peer, pairs, verify=verify)
            if not self._outbox.has_work(peer):
                return
            if peer in self._links:
                self._links[peer][0].wake()
            else:
                self._start(peer)

    def close(self) -> None:
        """End all threads, at most about JOIN_SECONDS; no event follows for what they had under
        way.
        """
        deadline = time.monotonic() + JOIN_SECONDS
        with self._lock:
            links = list(self._links.values())
            for link, _ in links:
                link.stop()
        for _, thread in links:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self, peer: PeerAddress) -> None:
        link = Link(peer, self._outbox, self._memory, self._settings)
        thread = threading.Thread(
            target=self._serve, args=(link,), name=f"kv-to-{peer[1]}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as e:  # no more threads: this peer alone fails
            link.close()
            self._outbox.fail(peer, str(e))
        else:
            self._links[peer] = (link, thread)

    def _serve(self, link: Link) -> None:
        while self._run(link):
            pass  # the peer closed an idle connection just as new work came: connect again

    def _run(self, link: Link) -> bool:
        """One connection, from connect to its end; True if the link must go on with another."""
        reason = None
        try:
            link.run()
        except Stopped:
            reason = "closed"
        except Exception as e:
            reason = sockets.describe(e)
            is_expected = isinstance(e, OSError | PeerError | ValueError)
            logger.warning(
                "KV connection failed engine_id=%s address=%s: %s",
                *link.peer,
                reason,
                exc_info=not is_expected,
            )
        with self._lock:
            if reason is None and self._outbox.has_work(link.peer):
                return True
            del self._links[link.peer]
            link.close()
            if reason is not None:
                self._outbox.fail(link.peer, reason)
            return False
