"""The API keys, as the files of a mounted Secret are now: each file is one key, its name the
tenant's. A key that is gone is never accepted, with none left every request is refused, and only
while the folder cannot be read do the last ones stay.  Keys are never logged.
"""

import asyncio
import hmac
import logging
from hashlib import sha256
from pathlib import Path

from pdcluster_worker.errors import ConfigError

logger = logging.getLogger(__name__)

CHECK_SECONDS = 5.0
"""Period of looks at the folder; little beside the minute or two in which a kubelet changes a
mounted Secret.
"""


class ApiKeys:
    """Without a folder every client is welcome.  Raises ConfigError if the first reading fails."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._read: dict[str, bytes] | None = None
        self._digests: dict[str, bytes] = {}  # by the file's name
        self._refused = ""
        if folder is not None:
            content = _content(folder)
            if bad := self._take(content) or ([] if content else [_no_key(folder)]):
                raise ConfigError(bad[0])

    @property
    def required(self) -> bool:
        return self._folder is not None

    def accepts(self, key: str) -> bool:
        return self.tenant_of(key) is not None

    def tenant_of(self, key: str) -> str | None:
        """None for no key.  Every key is compared, so a near miss takes as long as nonsense."""
        presented = sha256(key.encode(errors="surrogateescape")).digest()
        names = [
            name for name, known in self._digests.items() if hmac.compare_digest(presented, known)
        ]
        return names[0] if names else None

    async def watch(self) -> None:
        """Follow the folder until cancelled; returns at once when there is none."""
        while self.required:
            await asyncio.sleep(CHECK_SECONDS)
            self.reload()

    def reload(self) -> bool:
        """Look once; True if other keys are in force now."""
        if self._folder is None:
            return False
        try:
            content = _content(self._folder)
        except ConfigError as e:
            self._unreadable(str(e))
            return False
        if content == self._read:
            return False
        before = self._digests
        for reason in self._take(content):
            logger.error("ignored an unusable API key reason=%s", reason)
        if self._digests:
            logger.info("API keys reloaded folder=%s keys=%d", self._folder, len(self._digests))
        else:
            logger.error(
                "no API key is left, every request is refused with 401 reason=%s",
                _no_key(self._folder),
            )
        return self._digests != before

    def _take(self, content: dict[str, bytes]) -> list[str]:
        good: dict[str, bytes] = {}
        bad: list[str] = []
        for name, value in content.items():
            try:
                good[name] = sha256(_key(f"{self._folder}/{name}", value)).digest()
            except ConfigError as e:
                bad.append(str(e))
        self._digests, self._read, self._refused = good, content, ""
        return bad

    def _unreadable(self, reason: str) -> None:
        if reason != self._refused:
            logger.error("cannot read the API keys, keeping the last ones reason=%s", reason)
        self._refused = reason


def _content(folder: Path) -> dict[str, bytes]:
    """By name; what Kubernetes itself puts into a mounted Secret begins with a dot."""
    try:
        return {
            path.name: path.read_bytes()
            for path in sorted(folder.iterdir())
            if not path.name.startswith(".") and path.is_file()
        }
    except OSError as e:
        raise ConfigError(
            f"listen.apiKeys: {e.filename or folder} cannot be read: {e.strerror}"
        ) from e


def _no_key(folder: Path) -> str:
    return (
        f"listen.apiKeys: {folder} holds no key: put one file per key there, or leave apiKeys out"
    )


def _key(path: str, content: bytes) -> bytes:
    key = content.strip()
    if not key:
        raise ConfigError(f"listen.apiKeys: {path} is empty: write the key into it, or remove it")
    if not all(33 <= byte <= 126 for byte in key):
        raise ConfigError(
            f"listen.apiKeys: {path} holds more than one word of printable ASCII, which no client "
            "can send as a key"
        )
    return key
