"""Applies edits of the PDCluster file to a running cluster.

Policy (routing, qos, and cors, limits, models and sharedPrefixCache of service) goes to the
workers' policy file, placement.minTransferGBps takes effect here; edits without an effect here are
ignored, and any other or invalid edit is refused while the last good policy stays.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pdcluster_api.manifests.worker_config import policy_file, service_addresses
from pdcluster_schema.faults import InvalidObjectError
from pdcluster_schema.load import load
from pdcluster_schema.pdcluster import PDCluster
from pdctl.local.ineffective import ineffective_remarks, without_ineffective
from pdctl.local.run_directory import write_yaml

_POLL_SECONDS = 1.0
_POLICY_SECTIONS = ("routing", "qos")
_POLICY_OF_SERVICE = ("sharedPrefixCache", "cors", "limits", "models")
_Stamp = tuple[int, int, int]


class PolicyWatcher:
    def __init__(
        self,
        source: Path,
        cluster: PDCluster,
        target: Path,
        report: Callable[[str], None],
        *,
        on_change: Callable[[], None] = lambda: None,
        addresses: Callable[[PDCluster], Mapping[str, str]] = service_addresses,
    ) -> None:
        """on_change: called after `cluster` was replaced.  addresses: of its other models, now."""
        self.cluster = cluster
        self._addresses = addresses
        self._written = policy_file(cluster, addresses(cluster))
        self._source = source
        self._on_change = on_change
        self._target = target
        self._report = report
        # so that the first look finds an edit made since the cluster was loaded
        self._seen: tuple[_Stamp, Mapping[str, str]] | None = None

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_POLL_SECONDS)
            self.poll()

    def poll(self) -> None:
        """Look for an edit, and for other clusters that came or went."""
        stamp, addresses = _stamp(self._source), self._addresses(self.cluster)
        # missing: an editor may be putting the new one in place
        if stamp is None or (stamp, addresses) == self._seen:
            return
        self._seen = stamp, addresses
        try:
            self._take(load(self._source))
        except InvalidObjectError as e:
            faults = [
                str(fault) if fault.line is None else f"line {fault.line}: {fault}"
                for fault in e.faults
            ]
            self._report("\n    ".join(["edit refused, the last good policy stays:", *faults]))
        except Exception as e:  # whatever an edit does, the cluster goes on
            self._report(
                f"edit not taken, the last good policy stays: {type(e).__name__}: {e}; save the "
                "file to try again"
            )

    def _take(self, edited: PDCluster) -> None:
        fixed = restart_fields(self.cluster, edited)
        if fixed:
            self._report(
                f"edit refused, the last good policy stays: {', '.join(fixed)} changed; restart to "
                "apply"
            )
            return
        before, policy = self.cluster, policy_file(edited, self._addresses(edited))
        if policy != self._written:
            write_yaml(self._target, policy)
            self._written = policy
            self._report("policy updated")
        self.cluster = edited
        self._on_change()
        reported = ineffective_remarks(before)
        for remark in ineffective_remarks(edited):
            if remark not in reported:
                self._report(remark)


def restart_fields(running: PDCluster, edited: PDCluster) -> list[str]:
    """Paths of changed fields that need a restart."""
    return list(_differences(_fixed_part(running), _fixed_part(edited), ""))


def _fixed_part(cluster: PDCluster) -> dict[str, Any]:
    spec = cluster.spec.model_dump(by_alias=True)
    # of a role's engine only what it was given counts
    for name, role in cluster.spec.roles.present().items():
        spec["roles"][name]["engine"] = role.engine.model_dump(by_alias=True, exclude_unset=True)
    for field in _POLICY_OF_SERVICE:
        del spec["service"][field]
    identity = {"name": cluster.metadata.name, "namespace": cluster.metadata.namespace}
    return {
        "metadata": identity,
        "spec": {
            key: value
            for key, value in without_ineffective(spec).items()
            if key not in _POLICY_SECTIONS
        },
    }


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
