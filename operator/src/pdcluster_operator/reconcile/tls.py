"""The two Secrets of a cluster's certificates: the next step of `certificates`, as manifests."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.certificates.authority import StoredSecret
from pdcluster_api.certificates.rotation import RotationStep, carry_out, next_step
from pdcluster_api.manifests.objects import child_names
from pdcluster_api.manifests.render import Owner, render_tls_secrets
from pdcluster_operator.writes.actions import ObjectName
from pdcluster_operator.writes.drift import Manifest
from pdcluster_schema import labels


@dataclass(frozen=True)
class TlsStep:
    """manifests: both Secrets when one is to be written; rewrite: existing ones."""

    manifests: Collection[Manifest] = ()
    rewrite: Collection[ObjectName] = ()
    reason: str = ""
    requeue_after_seconds: float | None = None


def tls_step(live: Live, owner: Owner, now: datetime) -> TlsStep:
    """The next step of the cluster's certificates, mostly none."""
    secrets, called = live.own("Secret"), child_names(live.key.name)
    names = [called.authority, called.certificates]
    if any("deletionTimestamp" in secrets[name]["metadata"] for name in names if name in secrets):
        # it can be made again when it is gone, and the other must not go ahead of it
        return TlsStep()
    ca, tls = (StoredSecret.of(secrets.get(name)) for name in names)
    requested = live.body["metadata"].get("annotations", {}).get(labels.ROTATE_CA)
    decision = next_step(ca, tls, now, requested)
    if decision.step is RotationStep.KEEP:
        return TlsStep(requeue_after_seconds=decision.requeue_after_seconds)
    made = carry_out(decision.step, ca, tls, now, requested)
    manifests = render_tls_secrets(
        owner,
        made.ca.data,
        made.tls.data,
        ca_annotations=made.ca.annotations,
        tls_annotations=made.tls.annotations,
    )
    # What is made at first must not replace Secrets that the cache has not seen yet.
    is_first = ca is None and tls is None
    rewrite = [] if is_first else [ObjectName("Secret", name) for name in names]
    return TlsStep(
        manifests, rewrite, "" if is_first else decision.reason, decision.requeue_after_seconds
    )


def certificates_end(live: Live) -> datetime | None:
    """Time when the certificate that workers show ends; None = it cannot be read."""
    secret = live.own("Secret").get(child_names(live.key.name).certificates)
    stored = StoredSecret.of(secret)
    return stored.certificate_end if stored else None
