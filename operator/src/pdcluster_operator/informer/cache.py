"""The informer cache: every PDCluster and child as the watches last delivered them, trimmed and
compressed. An older version never replaces a newer one, so answers to our own writes are put in at
once. Of an object whose owner is not the PDCluster that is here only the identity is kept.
"""

import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdcluster_api.apiserver.kinds import Body, Key
from pdcluster_operator.informer.compression import CompressedBody, Compressor
from pdcluster_schema import labels
from pdcluster_schema.load import bounded
from pdcluster_schema.pdcluster import KIND

# Time for which a deletion is remembered: an answer to a write comes within its time limit
REMEMBER_SECONDS = 60.0

MAX_REMEMBERED = 10_000
_OURS = f"{labels.GROUP}/"
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_IDENTITY = (
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "deletionTimestamp",
    "creationTimestamp",
)
_POD_LABELS = frozenset(
    {labels.CLUSTER, labels.ROLE, labels.POOL, labels.REVISION, labels.COMPONENT}
)
MAX_UID = 64  # Characters of a uid that is believed; one of Kubernetes has 36
# Bytes of all objects of one PDCluster, as JSON: above those of the largest one with two revisions.
# A user may make more that look like its own: of those only the identity is kept, by which they are
# deleted.
MAX_BYTES = 24 * 2**20
MAX_OWNERS = 4  # Owners that are kept of an object that is not ours: a real one has one
# managers of their fields are not needed
_NO_DRIFT = frozenset({KIND, "Pod", "ControllerRevision"})


class Name(NamedTuple):
    """Kind, namespace and name of an object."""

    kind: str
    namespace: str
    name: str


class ObjectVersion(NamedTuple):
    """Mark by which two bodies of one name differ: another object (uid), or another state of it."""

    uid: str
    resource_version: int


@dataclass(frozen=True, slots=True)
class _CacheEntry:
    """foreign: uids of its owners, of an object of which the identity alone is kept"""

    version: ObjectVersion
    owner: Key
    compressed: CompressedBody
    foreign: tuple[str, ...] = ()


@dataclass
class Cache:
    """Bodies by kind and name, and by the PDCluster that they belong to."""

    clock: Callable[[], float] = time.monotonic
    _compressor: Compressor = field(default_factory=Compressor)
    _entries: dict[Name, _CacheEntry] = field(default_factory=dict)
    # by uid the objects deleted lately: the last version, and the time of its deletion event
    _removed: "OrderedDict[str, tuple[int, float]]" = field(default_factory=OrderedDict)
    _children: defaultdict[Key, set[Name]] = field(default_factory=lambda: defaultdict(set))
    # of each PDCluster with its objects, as JSON
    _num_bytes: defaultdict[Key, int] = field(default_factory=lambda: defaultdict(int))
    # likewise, the number of the last change
    _changes: dict[Key, int] = field(default_factory=dict)
    _num_changes: int = 0

    def put(self, kind: str, body: Mapping[str, Any]) -> Key | None:
        """Keep a body; returns its PDCluster, or None when nothing newer was learnt."""
        name, version, owner = name_of(kind, body), version_of(body), owner_of(kind, body)
        known = self._entries.get(name)
        if known is not None and not _is_newer(version, known.version):
            return None
        if self._is_removed(version):
            return None
        if owner is None:  # its label or its owner was taken away
            return self.forget(name)
        foreign = () if kind in (KIND, "Pod") else self._foreign(owner, body)
        self._drop(name)
        compressed = self._pack(kind, body, owner, is_foreign=bool(foreign))
        self._entries[name] = _CacheEntry(version, owner, compressed, foreign)
        self._children[owner].add(name)
        self._num_bytes[owner] += compressed.num_bytes
        self._note_change(owner)
        return owner

    def remove(self, kind: str, body: Mapping[str, Any]) -> Key | None:
        """Forget a deleted object; a newer one of that name stays.  Returns its PDCluster."""
        name, version = name_of(kind, body), version_of(body)
        self._remember_removed(version)
        known = self._entries.get(name)
        if known is None or known.version.uid != version.uid:
            return None
        self._drop(name)
        return known.owner

    def get(self, kind: str, namespace: str, name: str) -> Body | None:
        entry = self._entries.get(Name(kind, namespace, name))
        return None if entry is None else entry.compressed.body()

    def children(self, key: Key, kinds: Collection[str] = ()) -> Iterator[Body]:
        """Bodies of a PDCluster's objects, in the order of kind and name; not the PDCluster
        itself.  kinds: none = all Each is as it is when it is asked for; what is deleted meanwhile
        is left out.
        """
        for name in sorted(self._children.get(key, ())):
            entry = self._entries.get(name)
            if entry is not None and name.kind != KIND and (not kinds or name.kind in kinds):
                yield entry.compressed.body()

    def unread(self, key: Key) -> list[Name]:
        uid = self._uid(key)
        return [name for name in self._children.get(key, ()) if uid in self._entries[name].foreign]

    def change(self, key: Key) -> int:
        """Number of the last change of a PDCluster or its objects; no two changes have the same."""
        return self._changes.get(key, 0)

    def clusters(self) -> list[Key]:
        return [entry.owner for name, entry in self._entries.items() if name.kind == KIND]

    def version(self, name: Name) -> ObjectVersion | None:
        entry = self._entries.get(name)
        return None if entry is None else entry.version

    def versions(self, kind: str) -> dict[Name, ObjectVersion]:
        return {name: entry.version for name, entry in self._entries.items() if name.kind == kind}

    def forget(self, name: Name) -> Key | None:
        entry = self._entries.get(name)
        self._drop(name)
        return None if entry is None else entry.owner

    def __len__(self) -> int:
        return len(self._entries)

    def _pack(
        self, kind: str, body: Mapping[str, Any], owner: Key, *, is_foreign: bool
    ) -> CompressedBody:
        if not is_foreign:
            compressed = self._compressor.compress(kind, trim(kind, body))
            total = self._num_bytes[owner] + compressed.num_bytes
            if kind in (KIND, "Pod") or total <= MAX_BYTES:
                return compressed
        return self._compressor.compress(kind, identity_of(kind, body, owner, self._uid(owner)))

    def _uid(self, key: Key) -> str | None:
        cluster = self._entries.get(Name(KIND, *key))
        return None if cluster is None else cluster.version.uid

    def _foreign(self, owner: Key, body: Mapping[str, Any]) -> tuple[str, ...]:
        uids = [reference["uid"] for reference in _references(owner.name, body)]
        return () if self._uid(owner) in uids else tuple(uids[:MAX_OWNERS])

    def _remember_removed(self, version: ObjectVersion) -> None:
        now = self.clock()
        self._removed[version.uid] = version.resource_version, now
        self._removed.move_to_end(version.uid)
        while (
            len(self._removed) > MAX_REMEMBERED
            or now - next(iter(self._removed.values()))[1] > REMEMBER_SECONDS
        ):
            self._removed.popitem(last=False)

    def _is_removed(self, version: ObjectVersion) -> bool:
        """A newer version is of an object that left the watch's selection and is back."""
        last, when = self._removed.get(version.uid, (0, 0.0))
        return version.resource_version <= last and self.clock() - when <= REMEMBER_SECONDS

    def _drop(self, name: Name) -> None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return
        self._children[entry.owner].discard(name)
        self._num_bytes[entry.owner] -= entry.compressed.num_bytes
        self._note_change(entry.owner)
        if not self._children[entry.owner]:
            del self._children[entry.owner], self._changes[entry.owner]
            del self._num_bytes[entry.owner]

    def _note_change(self, owner: Key) -> None:
        self._num_changes += 1
        self._changes[owner] = self._num_changes


def name_of(kind: str, body: Mapping[str, Any]) -> Name:
    return Name(kind, sys.intern(body["metadata"]["namespace"]), body["metadata"]["name"])


def version_of(body: Mapping[str, Any]) -> ObjectVersion:
    """Its version; a number, since versions of one kind are ordered."""
    return ObjectVersion(body["metadata"]["uid"], int(body["metadata"]["resourceVersion"]))


def owner_of(kind: str, body: Mapping[str, Any]) -> Key | None:
    """The PDCluster that an object is kept for, by label and owner (a pod by label); None = none.
    Objects that the StatefulSet controller makes carry our labels too, and are not ours.
    """
    metadata = body["metadata"]
    name = metadata["name"] if kind == KIND else metadata.get("labels", {}).get(labels.CLUSTER)
    if not name or not (kind in (KIND, "Pod") or _references(name, body)):
        return None
    # the same for every child: kept once
    return Key(sys.intern(metadata["namespace"]), sys.intern(name))


def _references(name: str, body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        each
        for each in body["metadata"].get("ownerReferences", ())
        if (each["kind"], each.get("name")) == (KIND, name) and len(each["uid"]) <= MAX_UID
    ]


def identity_of(kind: str, body: Mapping[str, Any], owner: Key, uid: str | None) -> Body:
    """The parts of a body that say which object it is, and whose.  uid: of its PDCluster"""
    metadata = body["metadata"]
    owners = sorted(_references(owner.name, body), key=lambda each: each["uid"] != uid)
    return {
        "apiVersion": body["apiVersion"],
        "kind": kind,
        "metadata": {
            **{key: metadata[key] for key in _IDENTITY if key in metadata},
            "ownerReferences": owners[:MAX_OWNERS],
        },
    }


def trim(kind: str, body: Mapping[str, Any]) -> Body:
    """A body without the fields that are never read."""
    metadata = {
        key: value
        for key, value in body["metadata"].items()
        if key != "managedFields" or kind not in _NO_DRIFT
    }
    if kind == "Pod":
        return {
            "apiVersion": "v1",
            "kind": kind,
            "metadata": {
                **{key: metadata[key] for key in _IDENTITY if key in metadata},
                "labels": {
                    key: value
                    for key, value in metadata.get("labels", {}).items()
                    if key in _POD_LABELS
                },
                "ownerReferences": metadata.get("ownerReferences", []),
                "annotations": {
                    key: value
                    for key, value in (metadata.get("annotations") or {}).items()
                    if key in (labels.GPU, labels.GPUS_PER_REPLICA)
                },
            },
            "spec": {
                key: value for key, value in body.get("spec", {}).items() if key == "nodeName"
            },
            "status": body.get("status", {}),
        }
    if kind == KIND:
        return {**bounded(body), "metadata": _metadata_of_cluster(metadata)}
    if _LAST_APPLIED in metadata.get("annotations", {}):
        metadata["annotations"] = {
            key: value for key, value in metadata["annotations"].items() if key != _LAST_APPLIED
        }
    return {**body, "metadata": metadata}


def _metadata_of_cluster(metadata: Mapping[str, Any]) -> Body:
    """With our annotations alone: others may have a quarter of a megabyte, and labels more."""
    annotations = metadata.get("annotations", {}).items()
    return {
        **{key: metadata[key] for key in (*_IDENTITY, "generation") if key in metadata},
        "annotations": {key: value for key, value in annotations if key.startswith(_OURS)},
    }


def _is_newer(version: ObjectVersion, known: ObjectVersion) -> bool:
    return version.resource_version > known.resource_version
