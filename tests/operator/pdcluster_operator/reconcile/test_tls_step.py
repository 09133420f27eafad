"""Cases in which the two Secrets of a cluster's certificates are left alone."""

import base64
import json
from datetime import UTC, datetime

import pytest

from pdcluster_api.apiserver.observe import Live
from pdcluster_api.manifests.objects import Owner
from pdcluster_operator.reconcile.apply_plan import TlsStep, tls_step
from tests.operator import bodies as made

OWNER = Owner(made.NAME, made.NAMESPACE, made.UID)
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def live(*children: made.Body) -> Live:
    return Live(made.cluster(), json.loads(json.dumps(children)))


def secrets() -> list[made.Body]:
    """Both as they are made at first."""
    return [json.loads(json.dumps(manifest)) for manifest in tls_step(live(), OWNER, NOW).manifests]


def test_what_was_just_made_is_kept():
    assert tls_step(live(*secrets()), OWNER, NOW).manifests == ()


@pytest.mark.parametrize("position", [0, 1])
def test_nothing_is_written_while_one_of_them_is_being_deleted(position: int):
    """A finalizer may hold it for long, and the other would be signed again in each reconcile."""
    both = secrets()
    both[position]["data"]["tls.key"] = base64.b64encode(b"broken").decode()
    assert tls_step(live(*both), OWNER, NOW).manifests != ()
    both[position]["metadata"]["deletionTimestamp"] = "2026-01-02T03:04:05Z"
    assert tls_step(live(*both), OWNER, NOW) == TlsStep()
