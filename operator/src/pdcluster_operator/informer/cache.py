"""The informer cache: every PDCluster and child as the watches last delivered them, trimmed and
compressed. An older version never replaces a newer one, so answers to our own writes are put in at
once. Of an object whose owner is not the PDCluster that is here only the identity is kept.
"""

import sys
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pdcluster_api.apiserver.kinds import Body, Key
from pdcluster_schema import labels
from pdcluster_schema.load import bounded
from pdcluster_schema.pdcluster import KIND
from pdcluster_schema.quick_json import decoded, encoded

# Time for which a deletion is remembered: an answer to a write comes within its time limit
REMEMBER_SECONDS = 60.0

MAX_REMEMBERED = 10_000

# Examples of a kind: a PDCluster has up to four children of one, each of another form
NUM_EXAMPLES = 4

MAX_EXAMPLE_BYTES = 32_768  # Bytes of a dictionary that zlib looks at: its window
_LEVEL = 3
_NO_EXAMPLES = frozenset({"Secret"})  # an example outlives its object
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
    (
        *(labels.CLUSTER, labels.ROLE, labels.POOL, labels.REVISION, labels.TEMPLATE),
        *(labels.COMPONENT, labels.WORKER),
    )
)
_POD_ANNOTATIONS = frozenset({labels.GPU, labels.GPUS_PER_REPLICA, labels.PODS_PER_REPLICA})
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
class CompressedBody:
    """One body.  examples: with which it was packed; num_bytes: as JSON"""

    content: bytes
    examples: bytes
    num_bytes: int

    def body(self) -> Body:
        decompressor = zlib.decompressobj(zdict=self.examples)
        body: Body = decoded(decompressor.decompress(self.content))
        return body


@dataclass
class Compressor:
    """Packs bodies as JSON, with the first few of each kind as zlib's dictionary: a later one takes
    a fifth of the space.
    """

    _examples: dict[str, tuple[bytes, int]] = field(default_factory=dict)  # with their number

    def compress(self, kind: str, body: Mapping[str, Any]) -> CompressedBody:
        text = encoded(body)
        examples, number = self._examples.get(kind, (b"", 0))
        compressor = zlib.compressobj(_LEVEL, zdict=examples)
        content = compressor.compress(text) + compressor.flush()
        if number < NUM_EXAMPLES and kind not in _NO_EXAMPLES:
            # the end of a dictionary is what is found at the least distance
            self._examples[kind] = (examples + text)[-MAX_EXAMPLE_BYTES:], number + 1
        return CompressedBody(content, examples, len(text))


@dataclass(frozen=True, slots=True)
class _CacheEntry:
    """foreign: uids of its owners, of an object of which the identity alone is kept"""

    version: ObjectVersion
    owner: Key
    compressed: CompressedBody
    foreign: tuple[str, ...] = ()


@dataclass(slots=True)
class _ClusterObjects:
    """A PDCluster with its objects.  num_bytes: as JSON; change: number of the last one"""

    names: set[Name] = field(default_factory=set)
    num_bytes: int = 0
    change: int = 0


@dataclass
class Cache:
    """Bodies by kind and name, and by the PDCluster that they belong to."""

    clock: Callable[[], float] = time.monotonic
    _compressor: Compressor = field(default_factory=Compressor)
    _entries: dict[Name, _CacheEntry] = field(default_factory=dict)
    _owned: dict[Key, _ClusterObjects] = field(default_factory=dict)
    # by uid the objects deleted lately: the last version, and the time of its deletion event
    _removed: "OrderedDict[str, tuple[int, float]]" = field(default_factory=OrderedDict)
    _num_changes: int = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, kind: str, body: Mapping[str, Any]) -> Key | None:
        """Keep a body; returns its PDCluster, or None when nothing newer was learnt."""
        name, version, owner = name_of(kind, body), version_of(body), owner_of(kind, body)
        known = self._entries.get(name)
        if known is not None and version.resource_version <= known.version.resource_version:
            return None
        if self._is_removed(version):
            return None
        if owner is None:  # its label or its owner was taken away
            return self.forget(name)
        foreign = () if kind in (KIND, "Pod") else self._foreign(owner, body)
        self.forget(name)
        compressed = self._compress(kind, body, owner, is_foreign=bool(foreign))
        self._entries[name] = _CacheEntry(version, owner, compressed, foreign)
        owned = self._owned.setdefault(owner, _ClusterObjects())
        owned.names.add(name)
        owned.num_bytes += compressed.num_bytes
        self._note_change(owned)
        return owner

    def remove(self, kind: str, body: Mapping[str, Any]) -> Key | None:
        """Forget a deleted object; a newer one of that name stays.  Returns its PDCluster."""
        name, version, now = name_of(kind, body), version_of(body), self.clock()
        self._removed[version.uid] = version.resource_version, now
        self._removed.move_to_end(version.uid)
        while (
            len(self._removed) > MAX_REMEMBERED
            or now - next(iter(self._removed.values()))[1] > REMEMBER_SECONDS
        ):
            self._removed.popitem(last=False)
        known = self.version(name)
        return self.forget(name) if known is not None and known.uid == version.uid else None

    def forget(self, name: Name) -> Key | None:
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        owned = self._owned[entry.owner]
        owned.names.discard(name)
        owned.num_bytes -= entry.compressed.num_bytes
        self._note_change(owned)
        if not owned.names:
            del self._owned[entry.owner]
        return entry.owner

    def get(self, kind: str, namespace: str, name: str) -> Body | None:
        entry = self._entries.get(Name(kind, namespace, name))
        return None if entry is None else entry.compressed.body()

    def children(self, key: Key, kinds: Collection[str] = ()) -> Iterator[Body]:
        """Bodies of a PDCluster's objects, in the order of kind and name; not the PDCluster
        itself.  kinds: none = all Each is as it is when it is asked for; what is deleted meanwhile
        is left out.
        """
        for name in sorted(self._names(key)):
            entry = self._entries.get(name)
            if entry is not None and name.kind != KIND and (not kinds or name.kind in kinds):
                yield entry.compressed.body()

    def unread(self, key: Key) -> list[Name]:
        """Children that came before their PDCluster, of which no more than the identity is kept."""
        uid = self._uid(key)
        return [name for name in self._names(key) if uid in self._entries[name].foreign]

    def change(self, key: Key) -> int:
        """Number of the last change of a PDCluster or its objects; no two changes have the same."""
        return self._owned[key].change if key in self._owned else 0

    def clusters(self) -> list[Key]:
        return [entry.owner for name, entry in self._entries.items() if name.kind == KIND]

    def version(self, name: Name) -> ObjectVersion | None:
        entry = self._entries.get(name)
        return None if entry is None else entry.version

    def versions(self, kind: str) -> dict[Name, ObjectVersion]:
        return {name: entry.version for name, entry in self._entries.items() if name.kind == kind}

    def num_bytes(self, key: Key) -> int:
        """Bytes of a PDCluster and its objects, as JSON."""
        return self._owned[key].num_bytes if key in self._owned else 0

    def _names(self, key: Key) -> Collection[Name]:
        return self._owned[key].names if key in self._owned else ()

    def _compress(
        self, kind: str, body: Mapping[str, Any], owner: Key, *, is_foreign: bool
    ) -> CompressedBody:
        if not is_foreign:
            compressed = self._compressor.compress(kind, trim(kind, body))
            total = self.num_bytes(owner) + compressed.num_bytes
            if kind in (KIND, "Pod") or total <= MAX_BYTES:
                return compressed
        return self._compressor.compress(kind, _identity_of(kind, body, owner, self._uid(owner)))

    def _uid(self, key: Key) -> str | None:
        cluster = self.version(Name(KIND, *key))
        return None if cluster is None else cluster.uid

    def _foreign(self, owner: Key, body: Mapping[str, Any]) -> tuple[str, ...]:
        uids = [reference["uid"] for reference in _references(owner.name, body)]
        return () if self._uid(owner) in uids else tuple(uids[:MAX_OWNERS])

    def _is_removed(self, version: ObjectVersion) -> bool:
        """A newer version is of an object that left the watch's selection and is back."""
        last, when = self._removed.get(version.uid, (0, 0.0))
        return version.resource_version <= last and self.clock() - when <= REMEMBER_SECONDS

    def _note_change(self, owned: _ClusterObjects) -> None:
        self._num_changes += 1
        owned.change = self._num_changes


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


def _identity_of(kind: str, body: Mapping[str, Any], owner: Key, uid: str | None) -> Body:
    """The parts of a body that say which object it is, and whose.  uid: of its PDCluster"""
    metadata = body["metadata"]
    owners = sorted(_references(owner.name, body), key=lambda each: each["uid"] != uid)
    return {
        "apiVersion": body["apiVersion"],
        "kind": body["kind"],
        "metadata": {**_only(metadata, _IDENTITY), "ownerReferences": owners[:MAX_OWNERS]},
    }


def trim(kind: str, body: Mapping[str, Any]) -> Body:
    metadata = dict(body["metadata"])
    marks, annotations = metadata.get("labels", {}), metadata.get("annotations") or {}
    if kind == "Pod":
        return {
            "apiVersion": "v1",
            "kind": kind,
            "metadata": {
                **_only(metadata, (*_IDENTITY, "deletionGracePeriodSeconds")),
                "labels": _only(marks, _POD_LABELS),
                "ownerReferences": metadata.get("ownerReferences", []),
                "annotations": _only(annotations, _POD_ANNOTATIONS),
            },
            "spec": _only(body.get("spec", {}), ("nodeName", "terminationGracePeriodSeconds")),
            "status": body.get("status", {}),
        }
    if kind == KIND:
        # with our annotations alone: others may have a quarter of a megabyte, and labels more
        ours = {key: value for key, value in annotations.items() if key.startswith(_OURS)}
        kept = {**_only(metadata, (*_IDENTITY, "generation")), "annotations": ours}
        return {**bounded(body), "metadata": kept}
    if kind in _NO_DRIFT:
        metadata.pop("managedFields", None)
    if _LAST_APPLIED in annotations:
        metadata["annotations"] = _only(annotations, annotations.keys() - {_LAST_APPLIED})
    return {**body, "metadata": metadata}


def _only(mapping: Mapping[str, Any], keys: Collection[str]) -> Body:
    return {key: value for key, value in mapping.items() if key in keys}
