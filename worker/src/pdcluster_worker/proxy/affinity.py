"""Ties between requests, read from a body without parsing it where possible.  Text of the prompt is
found by its field's name, so a prefix is the same whatever comes before it.
"""

import msgspec

from pdcluster_schema.routing import DecodeScoreSpec, RelayingSpec

_PROMPTS = (b'"messages"', b'"prompt"')


def affinity_of(policy: RelayingSpec, score: DecodeScoreSpec, body: bytes) -> bytes:
    """The session of a request, else for `textPrefix` the beginning of its prompt; b"" = neither.

    >>> body = b'{"model": "m", "messages": [{"role": "user", "content": "A long story"}]}'
    >>> affinity_of(RelayingSpec(policy="textPrefix", prefix_bytes=64), DecodeScoreSpec(), body)
    b'"messages": [{"role": "user", "content": "A long story"}]}'
    >>> affinity_of(RelayingSpec(), DecodeScoreSpec(), body)
    b''
    """
    if score.session_affinity and b'"session"' in body and (session := _session(body)):
        return session
    if policy.policy != "textPrefix":
        return b""
    for name in _PROMPTS:
        if (start := body.find(name)) >= 0:
            return body[start : start + policy.prefix_bytes]
    return b""


def _session(body: bytes) -> bytes:
    try:
        return _bodies.decode(body).pdcluster.session.encode()
    except (ValueError, RecursionError):
        return b""


class _Extension(msgspec.Struct):
    session: str


class _PartialBody(msgspec.Struct):
    pdcluster: _Extension


_bodies = msgspec.json.Decoder(_PartialBody)
