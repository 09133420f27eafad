"""The policy file on disk: hot-reloaded; a bad one is refused and the last good one kept.  Beside
it the operator writes the conditions of the PDCluster.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from pdcluster_schema.conditions import CONDITIONS_FILE, SEVERITIES, severity_of
from pdcluster_schema.faults import InvalidObjectError, validated_known
from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.config.documents import check_numbers, document_of
from pdcluster_worker.errors import ConfigError
from pdcluster_worker.messages.overview import ConditionsOverview

logger = logging.getLogger(__name__)

CHECK_SECONDS = 1.0  # compared by content: a mounted ConfigMap swaps links


def load_policy(path: Path) -> PolicyConfig:
    """Unknown fields, of a newer operator, are logged.  Raises ConfigError."""
    document = document_of(path)
    check_numbers(path, document)
    try:
        policy, unknown = validated_known(PolicyConfig, document)
    except InvalidObjectError as e:
        raise ConfigError(f"{path}: {'; '.join(map(str, e.faults))}") from e
    if unknown:
        logger.warning(
            "ignored unknown fields of the policy, applied the others path=%s fields=%s",
            path,
            ",".join(unknown),
        )
    return policy


class PolicyFile:
    """Without a path `current` stays the default.  Raises ConfigError if the first read fails."""

    def __init__(self, path: Path | None) -> None:
        self.current = PolicyConfig() if path is None else load_policy(path)
        self._path = path
        self._read = _content(path)

    async def watch(self, on_change: Callable[[PolicyConfig], None]) -> None:
        """Runs until cancelled; errors of `on_change` are logged."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self.reload():
                try:
                    on_change(self.current)
                except Exception:
                    logger.exception("a policy change was applied only in part path=%s", self._path)

    def reload(self) -> bool:
        """Return whether another policy is in force now."""
        content = _content(self._path)
        if self._path is None or content == self._read:
            return False
        self._read = content
        try:
            policy = load_policy(self._path)
        except ConfigError as e:
            logger.error("refused a policy change, the last good one stays reason=%s", e)
            return False
        changed = policy != self.current
        self.current = policy
        if changed:
            logger.info("policy reloaded path=%s", self._path)
        return changed


class ConditionsFile:
    """policy: path of the policy file; None = there is none, and no conditions."""

    def __init__(self, policy: Path | None) -> None:
        self._path = None if policy is None else policy.with_name(CONDITIONS_FILE)
        self._read: bytes | None = None
        self._known: ConditionsOverview | None = None

    def current(self) -> ConditionsOverview | None:
        """The conditions, the worst first; None without a file that can be read."""
        content = _content(self._path)
        if content != self._read:
            self._read, self._known = content, None
            if content is not None:
                try:
                    self._known = _graded(msgspec.json.decode(content, type=ConditionsOverview))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
                    logger.warning("passed over the conditions path=%s error=%s", self._path, e)
        return self._known


def _graded(found: ConditionsOverview) -> ConditionsOverview:
    graded = [
        replace(each, severity=severity_of(each.type, each.status, each.reason))
        for each in found.items
    ]
    graded.sort(key=lambda each: SEVERITIES.index(each.severity))
    return replace(found, items=graded)


def _content(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError:
        return None
