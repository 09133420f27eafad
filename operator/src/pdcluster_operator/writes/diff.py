"""Compare desired and live objects, and return the actions. Pure. Ours is what has an owner
reference to the PDCluster's uid; an object of our name without it is never touched.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pdcluster_api.apiserver.kinds import CHILD_OF_NAME, MAKE_PODS, ApplyStrategy, kind_name
from pdcluster_operator.writes.actions import POSITIONS, Action, ObjectName, Verb
from pdcluster_operator.writes.drift import Manifest, has_drifted, prepared, stamped
from pdcluster_schema.quick_json import encoded


def compare(
    owner_uid: str,
    desired: Iterable[Manifest],
    live: Iterable[Manifest],
    *,
    rewrite: Collection[ObjectName] = (),
    leave: Collection[ObjectName] = (),
    foreground: Collection[ObjectName] = (),
    settled: dict[ObjectName, bytes] | None = None,
) -> Iterator[Action | None]:
    """Actions that turn the live children of a PDCluster into the desired ones.

    One desired object is compared for each that is asked for; None = it is as it should be.

    owner_uid: of the PDCluster; every desired manifest names it in its controller reference
    live:      bodies with apiVersion, kind and managedFields; also of other owners and kinds
    rewrite:   Secrets that are to be written again though they exist
    leave:     what stays as it is though it is not among the desired ones
    foreground: objects to delete in the foreground, if they are deleted
    settled:   what was as it should be, by digests of both: it is not compared again; kept up to
               date here
    Raises ValueError for a desired manifest of a kind that `kinds.CHILDREN` does not have.
    """
    by_name = {_name_of(manifest): manifest for manifest in desired}
    unknown = sorted({name.kind for name in by_name} - CHILD_OF_NAME.keys())
    if unknown:
        kinds = ", ".join(unknown)
        raise ValueError(f"no rule for children of kind {kinds}: add it to apiserver/kinds.py")
    found = {_name_of(body): body for body in live}
    settled = {} if settled is None else settled
    for name in settled.keys() - by_name.keys():
        del settled[name]
    unwanted = [
        body
        for name, body in sorted(found.items(), key=_for_deletion)
        if name not in by_name and name not in leave
    ]
    for name, manifest in sorted(by_name.items(), key=_by_kind):
        pair = b"" if name in rewrite else _digest(manifest, found.get(name))
        if pair and settled.get(name) == pair:
            yield None
            continue
        body: Manifest = prepared(manifest)
        if CHILD_OF_NAME[name.kind].strategy is not ApplyStrategy.REQUEST:
            body = stamped(body)
        action = decide(body, found.get(name), rewrite=name in rewrite)
        if action is None:
            settled[name] = pair
        yield action
    for body in unwanted:
        if _may_go(body, owner_uid):
            yield _deletion(body, foreground=_name_of(body) in foreground)


def _digest(desired: Manifest, live: Manifest | None) -> bytes:
    """Digest of a desired object and the version of a live one; empty = that has none."""
    metadata = live["metadata"] if live is not None else {}
    if not (version := metadata.get("resourceVersion")):
        return b""
    return hashlib.sha256(encoded((metadata.get("uid"), version, desired))).digest()


def decide(desired: Manifest, live: Manifest | None, *, rewrite: bool = False) -> Action | None:
    """Action that turns a live object into a prepared manifest; None = nothing, or nothing yet."""
    strategy, owner = CHILD_OF_NAME[kind_name(desired)].strategy, _controller(desired)
    if live is None:
        return _action(Verb.CREATE, desired, rewrite=rewrite)
    metadata = live["metadata"]
    if metadata.get("deletionTimestamp"):  # it will be created again when it is gone
        is_waiting = "foregroundDeletion" in metadata.get("finalizers", ())
        # and that not only after the last of what it owns, which may be stuck
        return _deletion(live) if is_waiting and is_owned(live, owner["uid"]) else None
    if not is_owned(live, owner["uid"]):
        # The child of a deleted PDCluster of the same name is waiting for the garbage collector.
        is_left = _is_same_name(_controller(live), owner)
        return None if is_left else _action(Verb.REFUSE, desired)
    is_kept = strategy is ApplyStrategy.KEPT
    if strategy is ApplyStrategy.REQUEST:
        return _patch(desired, live, desired)
    if strategy is ApplyStrategy.RECORD or (is_kept and not rewrite):
        # by which it is found
        marks = desired["metadata"].get("labels", {})
        return _patch(desired, live, {"metadata": {"labels": marks}})
    is_same = live.get("data") == desired.get("data") and desired.get("immutable")
    # A Secret that was made immutable is the user's to delete.
    if live.get("immutable") and not is_kept and not is_same:
        return _action(Verb.REPLACE, desired, uid=metadata["uid"], rewrite=rewrite)
    if not has_drifted(desired, live):
        return None
    return _action(Verb.APPLY, desired, uid=metadata["uid"], rewrite=rewrite)


def is_owned(body: Manifest, owner_uid: str) -> bool:
    references = body["metadata"].get("ownerReferences") or ()
    return any(reference.get("uid") == owner_uid for reference in references)


def _action(verb: Verb, desired: Manifest, **fields: Any) -> Action:
    metadata, kind = desired["metadata"], CHILD_OF_NAME[kind_name(desired)]
    return Action(verb, kind, metadata["namespace"], metadata["name"], desired, **fields)


def _deletion(live: Manifest, *, foreground: bool = False) -> Action:
    deletion = _action(Verb.DELETE, live, uid=live["metadata"]["uid"], foreground=foreground)
    return replace(deletion, desired={})


def _patch(desired: Manifest, live: Manifest, part: Manifest) -> Action | None:
    patch = _missing(part, live)
    return _action(Verb.PATCH, desired, uid=live["metadata"]["uid"], patch=patch) if patch else None


def _missing(desired: Any, live: Any) -> dict[str, Any]:
    """The merge patch that sets the fields of a desired mapping in a live one; it removes none."""
    patch: dict[str, Any] = {}
    for key, value in desired.items():
        if isinstance(value, Mapping):
            inner = _missing(value, live.get(key) or {})
            if inner:
                patch[key] = inner
        elif live.get(key) != value and key != "ownerReferences":
            patch[key] = value
    return patch


def _may_go(body: Manifest, owner_uid: str) -> bool:
    kind = CHILD_OF_NAME.get(kind_name(body))
    is_deletable = kind is not None and kind.strategy is not ApplyStrategy.KEPT
    is_going = body["metadata"].get("deletionTimestamp")
    return is_deletable and not is_going and is_owned(body, owner_uid)


def _controller(body: Manifest) -> Mapping[str, Any]:
    references = body["metadata"].get("ownerReferences") or ()
    return next((each for each in references if each.get("controller")), {})


def _is_same_name(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(field) == other.get(field) for field in ("apiVersion", "kind", "name"))


def _name_of(body: Manifest) -> ObjectName:
    return ObjectName(kind_name(body), body["metadata"]["name"])


def _by_kind(item: tuple[ObjectName, Manifest]) -> tuple[int, str]:
    name, _ = item
    return POSITIONS[name.kind], name.name


def _for_deletion(item: tuple[ObjectName, Manifest]) -> tuple[bool, ObjectName]:
    name, _ = item
    return CHILD_OF_NAME.get(name.kind) not in MAKE_PODS, name
