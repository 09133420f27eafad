"""Compare desired and live objects, and return the actions. Pure. Ours is what has an owner
reference to the PDCluster's uid; an object of our name without it is never touched.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from pdcluster_api.apiserver.kinds import CHILD_OF_NAME, MAKE_PODS, ApplyStrategy, Kind
from pdcluster_operator.writes.actions import POSITIONS, Action, ObjectName, Verb
from pdcluster_operator.writes.drift import Manifest, has_drifted, prepared, stamped


def compare(
    owner_uid: str,
    desired: Iterable[Manifest],
    live: Iterable[Manifest],
    *,
    rewrite: Collection[ObjectName] = (),
    leave: Collection[ObjectName] = (),
    foreground: Collection[ObjectName] = (),
) -> Iterator[Action | None]:
    """Actions that turn the live children of a PDCluster into the desired ones.

    One desired object is compared for each that is asked for; None = it is as it should be.

    owner_uid: of the PDCluster; every desired manifest names it in its controller reference
    live:      bodies with apiVersion, kind and managedFields; also of other owners and kinds
    rewrite:   Secrets that are to be written again though they exist
    leave:     what stays as it is though it is not among the desired ones
    foreground: objects to delete in the foreground, if they are deleted
    Raises ValueError for a desired manifest of a kind that `kinds.CHILDREN` does not have.
    """
    by_name = {_name_of(manifest): manifest for manifest in desired}
    unknown = sorted({name.kind for name in by_name} - CHILD_OF_NAME.keys())
    if unknown:
        raise ValueError(
            f"no rule for children of kind {', '.join(unknown)}: add it to apiserver/kinds.py"
        )
    found = {_name_of(body): body for body in live}
    unwanted = [
        body
        for name, body in sorted(found.items(), key=_for_deletion)
        if name not in by_name and name not in leave
    ]
    for name, manifest in sorted(by_name.items(), key=_by_kind):
        yield decide(_marked(prepared(manifest)), found.get(name), rewrite=name in rewrite)
    for body in unwanted:
        if _may_go(body, owner_uid):
            yield _deletion(body, foreground=_name_of(body) in foreground)


def decide(desired: Manifest, live: Manifest | None, *, rewrite: bool = False) -> Action | None:
    """Action that turns a live object into a prepared manifest; None = nothing, or nothing yet."""
    kind = CHILD_OF_NAME[desired["kind"]]
    metadata = desired["metadata"]
    if live is None:
        return Action(
            Verb.CREATE, kind, metadata["namespace"], metadata["name"], desired, rewrite=rewrite
        )
    if live["metadata"].get("deletionTimestamp"):  # it will be created again when it is gone
        waits = "foregroundDeletion" in live["metadata"].get("finalizers", ()) and is_owned(
            live, _controller(desired)["uid"]
        )
        # and that not only after the last of what it owns, which may be stuck
        return _deletion(live) if waits else None
    if not is_owned(live, _controller(desired)["uid"]):
        # The child of a deleted PDCluster of the same name is waiting for the garbage collector.
        return (
            None
            if _is_same_name(_controller(live), _controller(desired))
            else _refusal(kind, desired)
        )
    uid = live["metadata"]["uid"]
    if kind.strategy is ApplyStrategy.REQUEST:
        return _patch(desired, live, desired)
    if kind.strategy is ApplyStrategy.RECORD or (
        kind.strategy is ApplyStrategy.KEPT and not rewrite
    ):
        # by which it is found
        return _patch(desired, live, {"metadata": {"labels": metadata.get("labels", {})}})
    verb = _verb(desired, live, is_kept=kind.strategy is ApplyStrategy.KEPT)
    return (
        None
        if verb is None
        else Action(
            verb, kind, metadata["namespace"], metadata["name"], desired, uid, rewrite=rewrite
        )
    )


def is_owned(body: Manifest, owner_uid: str) -> bool:
    return any(
        reference.get("uid") == owner_uid
        for reference in body["metadata"].get("ownerReferences") or ()
    )


def _marked(manifest: Manifest) -> Manifest:
    return (
        manifest
        if CHILD_OF_NAME[manifest["kind"]].strategy is ApplyStrategy.REQUEST
        else stamped(manifest)
    )


def _verb(desired: Manifest, live: Manifest, *, is_kept: bool) -> Verb | None:
    # A Secret that was made immutable is the user's to delete.
    if (
        live.get("immutable")
        and not is_kept
        and (live.get("data") != desired.get("data") or not desired.get("immutable"))
    ):
        return Verb.REPLACE
    return Verb.APPLY if has_drifted(desired, live) else None


def _patch(desired: Manifest, live: Manifest, part: Manifest) -> Action | None:
    patch = _missing(part, live)
    metadata = desired["metadata"]
    kind = CHILD_OF_NAME[desired["kind"]]
    return (
        Action(
            Verb.PATCH,
            kind,
            metadata["namespace"],
            metadata["name"],
            desired,
            live["metadata"]["uid"],
            patch,
        )
        if patch
        else None
    )


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


def _refusal(kind: Kind, desired: Manifest) -> Action:
    return Action(
        Verb.REFUSE, kind, desired["metadata"]["namespace"], desired["metadata"]["name"], desired
    )


def _deletion(body: Manifest, *, foreground: bool = False) -> Action:
    kind, metadata = CHILD_OF_NAME[body["kind"]], body["metadata"]
    return Action(
        Verb.DELETE,
        kind,
        metadata["namespace"],
        metadata["name"],
        {},
        metadata["uid"],
        foreground=foreground,
    )


def _may_go(body: Manifest, owner_uid: str) -> bool:
    kind = CHILD_OF_NAME.get(body["kind"])
    if (
        kind is None
        or kind.strategy is ApplyStrategy.KEPT
        or body["metadata"].get("deletionTimestamp")
    ):
        return False
    return is_owned(body, owner_uid)


def _controller(body: Manifest) -> Mapping[str, Any]:
    return next(
        (each for each in body["metadata"].get("ownerReferences") or () if each.get("controller")),
        {},
    )


def _is_same_name(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(field) == other.get(field) for field in ("apiVersion", "kind", "name"))


def _name_of(body: Manifest) -> ObjectName:
    return ObjectName(body["kind"], body["metadata"]["name"])


def _by_kind(item: tuple[ObjectName, Manifest]) -> tuple[int, str]:
    name, _ = item
    return POSITIONS[name.kind], name.name


def _for_deletion(item: tuple[ObjectName, Manifest]) -> tuple[bool, ObjectName]:
    name, _ = item
    return CHILD_OF_NAME.get(name.kind) not in MAKE_PODS, name
