"""The salt of a request's prefix cache: requests share cached blocks within one salt only.

By default each API key has a salt of its own, so neither `cached_tokens` nor the
time to the first token shows one client what another has asked.  A client may
separate its own users further with the field `cache_salt`, as vLLM names it.
The policy `sharedPrefixCache` gives all keys one cache.
"""

from hashlib import sha256

_DOMAIN = b"pdcluster prefix cache"


def cache_salt(key_digest: bytes, own: str | None, *, shared: bool) -> bytes:
    """Return 32 bytes, or b"" for the cache that needs no salt.

    key_digest: SHA-256 of the presented API key, b"" where no key is asked for.
    own:        the request's field `cache_salt`.
    shared:     one cache for all keys; `own` separates even then.

    >>> cache_salt(b"", None, shared=False)
    b''
    >>> cache_salt(b"k" * 32, None, shared=True)
    b''
    >>> alice, bob = (cache_salt(key * 32, None, shared=False) for key in (b"a", b"b"))
    >>> len(alice), alice == bob
    (32, False)
    """
    digest = b"" if shared else key_digest
    if not digest and own is None:
        return b""
    parts = (_DOMAIN, digest, b"" if own is None else sha256(own.encode()).digest())
    return sha256(b"".join(len(part).to_bytes(1) + part for part in parts)).digest()
