"""PodMonitors and PrometheusRules of an older operator: removed once, and an error of that stops
nothing.
"""

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdcluster_api.apiserver.errors import (
    ClusterError,
    ForbiddenError,
    NotFoundError,
    UnavailableError,
)
from pdcluster_api.apiserver.kinds import Kind
from pdcluster_operator.informer.listing import SELECTOR
from pdcluster_operator.reconcile.older_monitors import remove_older_monitors
from tests.operator import bodies

OF_NOBODY = bodies.child("PodMonitor", "mine", metadata={"ownerReferences": []})


class Api:
    """Has the objects of an older operator.  error: its answer to a list of PodMonitors"""

    def __init__(self, error: ClusterError | None = None) -> None:
        self.error = error
        self.deleted: list[tuple[str, str, str, str]] = []

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str
    ) -> AsyncIterator[dict[str, Any]]:
        assert labels == SELECTOR
        if self.error is not None and kind.name == "PodMonitor":
            raise self.error
        for body in (bodies.child(kind.name, "chat"), OF_NOBODY):
            yield body

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        self.deleted.append((kind.path(namespace), name, uid, namespace))


async def test_what_belongs_to_a_pdcluster_is_removed():
    api = Api()
    await remove_older_monitors(api, (None,))
    assert api.deleted == [
        (
            f"/apis/monitoring.coreos.com/v1/namespaces/default/{plural}",
            "chat",
            "uid-of-chat",
            "default",
        )
        for plural in ("podmonitors", "prometheusrules")
    ]


async def test_a_cluster_without_these_kinds_has_none_and_says_nothing(
    caplog: pytest.LogCaptureFixture,
):
    api = Api(NotFoundError("no such kind"))
    with caplog.at_level(logging.WARNING):
        await remove_older_monitors(api, ("models", "research"))
    assert (len(api.deleted), caplog.text) == (2, "")  # of the other kind


@pytest.mark.parametrize("error", [ForbiddenError("no right"), UnavailableError("away")])
async def test_an_error_is_logged_with_the_command_that_does_the_same(
    error: ClusterError, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        await remove_older_monitors(Api(error), ("models",))
    assert f"fix=kubectl delete podmonitors --namespace models --selector {SELECTOR}" in caplog.text
