"""Choose the next step of a cluster's certificates, so that no worker refuses another meanwhile.

A rotation has three writes, with a settle time after each of the first two:

    START_ROTATION   ca.crt = new + old   certificate of the old    all workers come to accept both
    SWITCH_LEAF      ca.crt = new + old   certificate of the new    all workers come to show the new
    FINISH_ROTATION  ca.crt = new         certificate of the new

Each step follows from what the Secrets hold and the time of the last change
alone, so a restart of the operator, or a write that failed half way, goes on
where it stood.  A Secret that was deleted or broken by hand is put right by
the same steps: with one Secret left nothing is interrupted; with none left
all is made again.  `next_step` is pure; `carry_out` only draws keys.
"""

import datetime
import enum
from collections.abc import Iterable
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from pdcluster_api.certificates.authority import (
    AUTHORITY_LIFETIME,
    CA_CERTIFICATES,
    CERTIFICATE,
    KEY,
    LEAF_LIFETIME,
    HeldPairs,
    Pair,
    StoredSecret,
    is_issued_by,
    issue,
    make_authority,
    read_secrets,
)
from pdcluster_schema.labels import CERTIFICATES_CHANGED, OBSERVED_ROTATION
from pdcluster_schema.ports import WORKER_NAME

# A kubelet takes about 90 s to change mounted files and a worker seconds to read them; the rest is
# for a slow node
SETTLE = datetime.timedelta(minutes=10)

RENEW_LEAF_BEFORE = LEAF_LIFETIME / 3
# longer than a leaf lives, so that no leaf is cut short by its authority's end
RENEW_AUTHORITY_BEFORE = AUTHORITY_LIFETIME / 5


class RotationStep(enum.Enum):
    """CREATE: make both.  ACCEPT_BOTH: add the authority to ca.crt.  The others: see the module."""

    KEEP = "keep"
    CREATE = "create"
    RENEW_LEAF = "renew leaf"
    START_ROTATION = "start rotation"
    ACCEPT_BOTH = "accept both"
    SWITCH_LEAF = "switch leaf"
    FINISH_ROTATION = "finish rotation"


@dataclass(frozen=True)
class RotationDecision:
    """One step."""

    step: RotationStep
    reason: str = ""  # what happens and why, in words for an event; empty with KEEP
    # when the next step falls due; None = not sooner than the resync
    requeue_after_seconds: float | None = None


@dataclass(frozen=True)
class Secrets:
    """`ca`: authority with key; `tls`: mounted by workers.  Data and our annotations."""

    ca: StoredSecret
    tls: StoredSecret


def next_step(
    ca: StoredSecret | None, tls: StoredSecret | None, now: datetime.datetime, requested: str | None
) -> RotationDecision:
    """Decide the next step.  ca, tls: the Secrets as they are, None = there is none requested:
    value of the PDCluster's annotation ROTATE_CA; a new value asks for a new authority
    """
    held = read_secrets(ca, tls, now)
    if held.authority is None or held.leaf is None:
        return _repair(held, is_first=ca is None and tls is None)
    if held.authority not in held.accepted:
        reason = f"{CA_CERTIFICATES} lacked the certificate authority: workers come to accept it"
        return RotationDecision(RotationStep.ACCEPT_BOTH, reason, SETTLE.total_seconds())
    is_switched = is_issued_by(held.leaf, held.authority)
    if not is_switched or held.accepted != (held.authority,):
        return _go_on(tls, now, is_switched=is_switched)
    return _renewal(
        held.authority, held.leaf, now, None if requested == _observed(ca) else requested
    )


def carry_out(
    step: RotationStep,
    ca: StoredSecret | None,
    tls: StoredSecret | None,
    now: datetime.datetime,
    requested: str | None,
) -> Secrets:
    """Content of the Secrets after a step; write `ca` first.  KEEP returns its input."""
    if step is RotationStep.KEEP and ca and tls:
        return Secrets(ca, tls)
    held = read_secrets(ca, tls, now)
    is_new = step in (RotationStep.CREATE, RotationStep.START_ROTATION)
    authority = make_authority(now) if is_new else _pair(ca)
    observed = requested if is_new and requested is not None else _observed(ca)
    leaf = (
        issue(authority, [WORKER_NAME], now)
        if step in (RotationStep.CREATE, RotationStep.RENEW_LEAF, RotationStep.SWITCH_LEAF)
        else _pair(tls)
    )
    others = () if step in (RotationStep.CREATE, RotationStep.FINISH_ROTATION) else held.accepted
    return Secrets(
        ca=StoredSecret(
            {CERTIFICATE: authority.certificate, KEY: authority.key},
            {} if observed is None else {OBSERVED_ROTATION: observed},
        ),
        tls=StoredSecret(
            {
                CA_CERTIFICATES: _bundle(authority, others),
                CERTIFICATE: leaf.certificate,
                KEY: leaf.key,
            },
            {CERTIFICATES_CHANGED: now.isoformat(timespec="seconds")},
        ),
    )


def _repair(held: HeldPairs, *, is_first: bool) -> RotationDecision:
    if held.authority is not None:
        return RotationDecision(
            RotationStep.RENEW_LEAF, f"renewed the workers' certificate: {held.leaf_fault}"
        )
    if held.leaf is not None:
        reason = (
            "moving to a new certificate authority, the old one's Secret cannot be used: "
            f"{held.authority_fault}"
        )
        return RotationDecision(RotationStep.START_ROTATION, reason, SETTLE.total_seconds())
    if is_first:
        return RotationDecision(
            RotationStep.CREATE, "made the certificate authority and the workers' certificate"
        )
    reason = (
        "replaced all certificates, and workers may refuse each other until they have read them: "
        f"authority: {held.authority_fault}"
    )
    return RotationDecision(
        RotationStep.CREATE, f"{reason}; workers' certificate: {held.leaf_fault}"
    )


def _go_on(
    tls: StoredSecret | None, now: datetime.datetime, *, is_switched: bool
) -> RotationDecision:
    """In a rotation: wait until the last change has reached all workers, then the next."""
    changed = _time(_annotation(tls, CERTIFICATES_CHANGED))
    if changed is None or changed > now:  # removed or edited: settle once more rather than guess
        return RotationDecision(
            RotationStep.ACCEPT_BOTH,
            "waiting again until workers have read the certificates",
            SETTLE.total_seconds(),
        )
    remaining = (changed + SETTLE - now).total_seconds()
    if remaining > 0:
        return RotationDecision(RotationStep.KEEP, requeue_after_seconds=remaining)
    if is_switched:
        return RotationDecision(
            RotationStep.FINISH_ROTATION,
            "workers accept the new certificate authority alone: the rotation is done",
        )
    return RotationDecision(
        RotationStep.SWITCH_LEAF,
        "workers come to show a certificate of the new authority",
        SETTLE.total_seconds(),
    )


def _renewal(
    authority: x509.Certificate,
    leaf: x509.Certificate,
    now: datetime.datetime,
    requested: str | None,
) -> RotationDecision:
    if requested is not None:
        return RotationDecision(
            RotationStep.START_ROTATION,
            "moving to a new certificate authority, as asked",
            SETTLE.total_seconds(),
        )
    if authority.not_valid_after_utc - now < RENEW_AUTHORITY_BEFORE:
        reason = (
            "moving to a new certificate authority: the old one ends on "
            f"{authority.not_valid_after_utc:%Y-%m-%d}"
        )
        return RotationDecision(RotationStep.START_ROTATION, reason, SETTLE.total_seconds())
    if leaf.not_valid_after_utc - now < RENEW_LEAF_BEFORE:
        return RotationDecision(
            RotationStep.RENEW_LEAF,
            f"renewed the workers' certificate, which ends on {leaf.not_valid_after_utc:%Y-%m-%d}",
        )
    return RotationDecision(RotationStep.KEEP)


def _bundle(authority: Pair, others: Iterable[x509.Certificate]) -> bytes:
    """The authority first, so that a reader that takes only one takes the newest."""
    first = x509.load_pem_x509_certificate(authority.certificate)
    return b"".join(
        one.public_bytes(serialization.Encoding.PEM)
        for one in (first, *(other for other in others if other != first))
    )


def _pair(stored: StoredSecret | None) -> Pair:
    data = stored.data if stored else {}
    return Pair(data.get(CERTIFICATE, b""), data.get(KEY, b""))


def _observed(ca: StoredSecret | None) -> str | None:
    return _annotation(ca, OBSERVED_ROTATION)


def _annotation(stored: StoredSecret | None, key: str) -> str | None:
    return stored.annotations.get(key) if stored else None


def _time(text: str | None) -> datetime.datetime | None:
    """None for what is not a time with its zone."""
    try:
        time = datetime.datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return time if time.tzinfo else None
