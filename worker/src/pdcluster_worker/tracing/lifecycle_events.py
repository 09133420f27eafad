"""Lifetime events of a request, from outputs of its engine and its prefill worker."""

import time

from pdcluster_worker.messages.engine import PrefillDone
from pdcluster_worker.messages.peers import Generated
from pdcluster_worker.messages.requests import Token
from pdcluster_worker.tracing.request_trace import add_event_at


def trace_first_token(generated: Generated) -> None:
    """A prefill here goes on to decode at once."""
    _trace_context(generated.token, generated.prefill or "local")
    if generated.prefill != "remote":
        add_event_at("decoding_begin", time.monotonic())


def trace_migration(done: PrefillDone) -> None:
    """The KV has come.  Writes begin while the prompt is computed: `seconds` has all of them."""
    now = time.monotonic()
    add_event_at("migration_begin", now - done.seconds)
    add_event_at("migration_end", now, seconds=done.seconds, bytes=done.num_bytes)
    add_event_at("decoding_begin", now)


def trace_last_token(token: Token) -> None:
    add_event_at("decoding_end", time.monotonic(), reason=token.finish_reason or "")


def trace_prefill(reply: Token | PrefillDone) -> None:
    """The part of a prefill worker."""
    now = time.monotonic()
    if isinstance(reply, Token):
        _trace_context(reply, "remote")
        return
    add_event_at("migration_begin", now - reply.seconds)
    add_event_at("migration_end", now, seconds=reply.seconds, bytes=reply.num_bytes)


def _trace_context(token: Token, place: str) -> None:
    now, seconds = time.monotonic(), token.prefill_seconds or 0.0
    add_event_at("context_begin", now - seconds, queue_seconds=token.queue_seconds or 0.0)
    add_event_at("context_end", now, prefill=place, cached_tokens=token.cached_tokens)
