"""A store in a Redis or Valkey server, which evicts by its own rule (`maxmemory-policy`)."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pdcluster_worker.errors import ModelError

logger = logging.getLogger(__name__)

CALL_SECONDS = 1.0
"""Time of one call, or to connect."""

KEYS_AT_ONCE = 512
"""Keys in one round trip."""

PREFIX = b"pdcluster-kv-1:"

_EVICTING = ("allkeys-lru", "allkeys-lfu", "allkeys-random", "allkeys-lrm")


class RedisStore:
    def __init__(self, name: str, url: str, password_file: Path | None, fingerprint: bytes) -> None:
        """A server that does not answer is none yet; raises ModelError for a password file that
        cannot be read.
        """
        self._prefix = PREFIX + fingerprint[:16] + b":"
        self.identity = f"{url}-{fingerprint[:8].hex()}"
        self._client = redis.Redis.from_url(
            url,
            password=None if password_file is None else _read(name, password_file),
            socket_timeout=CALL_SECONDS,
            socket_connect_timeout=CALL_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        try:
            self._check(name)
        except OSError as e:
            logger.error("%s: %s does not answer, and is tried again: %s", name, url, e)

    def has(self, keys: Sequence[bytes]) -> int:
        remaining, num_found = iter(keys), 0
        while some := list(islice(remaining, KEYS_AT_ONCE)):
            with _as_os_error(), self._client.pipeline(transaction=False) as pipeline:
                for key in some:
                    pipeline.exists(self._prefix + key)
                found = pipeline.execute()
            if 0 in found:
                return num_found + found.index(0)
            num_found += len(some)
        return num_found

    def get(self, key: bytes, parts: Sequence[memoryview]) -> int:
        with _as_os_error():
            value = self._client.get(self._prefix + key)
        if value is None:
            raise KeyError(key)
        assert isinstance(value, bytes)
        rest = memoryview(value)
        for part in parts:
            part[: len(rest)] = rest[: len(part)]
            rest = rest[len(part) :]
        return len(value)

    def put(self, key: bytes, parts: Sequence[bytes | memoryview]) -> None:
        with _as_os_error():
            if not self._client.touch(self._prefix + key):
                self._client.set(self._prefix + key, b"".join(parts))

    def delete(self, key: bytes) -> None:
        with _as_os_error():
            self._client.delete(self._prefix + key)

    def close(self) -> None:
        self._client.close()

    def _check(self, name: str) -> None:
        """Warn where a full server would take no more.  Raises OSError."""
        with _as_os_error():
            self._client.ping()
        try:
            memory = self._client.info("memory")
        except redis.RedisError:  # a user of the server may have no right to ask
            return
        if memory.get("maxmemory_policy") not in _EVICTING:
            logger.warning(
                "%s: maxmemory-policy of the server is %s, so that it takes no blocks once it is "
                "full: set maxmemory, and allkeys-lru",
                *(name, memory.get("maxmemory_policy")),
            )


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except redis.RedisError as e:
        needs_password = isinstance(e, redis.AuthenticationError) or "HELLO must be" in str(e)
        reason = "the server asks for another password: see passwordSecret"
        raise OSError(reason if needs_password else str(e)) from e


def _read(name: str, path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as e:
        raise ModelError(
            f"{name}: cannot read the password in {path}: {e.strerror}: put it into the key "
            "password of the Secret of passwordSecret"
        ) from e
