"""A PDCluster under a running operator, as a user and as Kubernetes see it."""

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from pdcluster_schema.labels import CLUSTER
from pdcluster_schema.load import parse
from pdcluster_schema.revision import revision_of
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.waiting import wait_for

T = TypeVar("T")
DEADLINE_SECONDS = 60.0
GROUP = "/apis/pdcluster.io/v1alpha1"
PLACES = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "ControllerRevision": ("/apis/apps/v1", "controllerrevisions"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "PDPoolScaler": (GROUP, "pdpoolscalers"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "Secret": ("/api/v1", "secrets"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
    "StatefulSet": ("/apis/apps/v1", "statefulsets"),
}
SPEC: Body = {
    "model": {"name": "tiny", "path": "/models/tiny"},
    "roles": {
        "prefill": {"pools": [{"name": "cpu", "replicas": 1}]},
        "decode": {"pools": [{"name": "cpu", "replicas": 2, "maxReplicas": 5}]},
    },
}


class Scene:
    """One PDCluster in a namespace, by its name."""

    def __init__(self, api: PlainApi, namespace: str, name: str = "chat") -> None:
        self.api, self.namespace, self.name = api, namespace, name
        self._clusters = f"{GROUP}/namespaces/{namespace}/pdclusters"

    def path(self, kind: str, name: str = "") -> str:
        """Path of a kind's objects in the namespace, or of one of them."""
        root, plural = PLACES[kind]
        return f"{root}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def create(self, **changes: Any) -> Body:
        """Make the PDCluster; changes: sections of the spec, over SPEC."""
        spec = {**copy.deepcopy(SPEC), **changes}
        body = {
            "apiVersion": "pdcluster.io/v1alpha1",
            "kind": "PDCluster",
            "metadata": {"name": self.name},
            "spec": spec,
        }
        return self.api.create(self._clusters, body)

    def change(self, **sections: Any) -> None:
        """Merge sections into the spec."""
        assert self.api.merge(f"{self._clusters}/{self.name}", {"spec": sections}) is not None

    def delete(self) -> None:
        """Delete the PDCluster."""
        self.api.delete(f"{self._clusters}/{self.name}")

    @property
    def body(self) -> Body:
        """The PDCluster."""
        found = self.api.get(f"{self._clusters}/{self.name}")
        assert found is not None, f"there is no PDCluster {self.name}"
        return found

    @property
    def status(self) -> Body:
        """Its status."""
        status: Body = self.body.get("status", {})
        return status

    @property
    def revision(self) -> str:
        """Revision of its spec as it is."""
        return revision_of(parse(self.body).spec)

    def condition(self, kind: str) -> Body:
        """A condition; empty when it is not there."""
        return next(
            (each for each in self.status.get("conditions", ()) if each["type"] == kind), {}
        )

    def await_condition(self, kind: str, status: str, reason: str | None = None) -> Body:
        """Wait for a condition of the newest spec; returns it."""

        def holds() -> Body | None:
            found, body = self.condition(kind), self.body
            is_new = found.get("observedGeneration") == body["metadata"]["generation"]
            return (
                found
                if is_new and found["status"] == status and reason in (None, found["reason"])
                else None
            )

        return wait_for(
            holds,
            DEADLINE_SECONDS,
            lambda: f"{kind}={status} {reason or ''}; status: {self.status}",
        )

    def until(self, holds: Callable[[], T]) -> T:
        """Wait for what is true in the end; returns it.  A failure shows all that there is."""
        return wait_for(
            holds,
            DEADLINE_SECONDS,
            lambda: f"{[*self.everything()]}; pods {[*self.pods()]}; status: {self.status}",
        )

    def children(self, kind: str) -> dict[str, Body]:
        """Children of the PDCluster, by name; objects that other controllers made with its labels
        are left out.
        """
        items = self.api.items(f"{self.path(kind)}?labelSelector={CLUSTER}={self.name}")
        return {body["metadata"]["name"]: body for body in items if _is_child(body)}

    def everything(self) -> dict[tuple[str, str], Body]:
        """All children."""
        return {(kind, name): body for kind in PLACES for name, body in self.children(kind).items()}

    def pods(self) -> dict[str, str]:
        """Uids of its pods, by name."""
        items = self.api.items(
            f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={CLUSTER}={self.name}"
        )
        return {body["metadata"]["name"]: body["metadata"]["uid"] for body in items}

    def versions(self) -> dict[tuple[str, ...], str]:
        """Versions that any write to the PDCluster or a child would change; a budget's status is
        Kubernetes' own.
        """
        found: dict[tuple[str, ...], str] = {
            (*key, "uid"): body["metadata"]["uid"] for key, body in self.everything().items()
        }
        found |= {
            (*key, "version"): body["metadata"]["resourceVersion"]
            for key, body in self.everything().items()
            if key[0] != "PodDisruptionBudget"
        }
        return {
            **found,
            ("PDCluster", self.name, "version"): self.body["metadata"]["resourceVersion"],
        }

    def settled_versions(self) -> dict[tuple[str, ...], str]:
        """Versions once two looks at them are equal: a condition can come before the last write of
        its pass.
        """
        last: dict[tuple[str, ...], str] = {}

        def is_settled() -> bool:
            nonlocal last
            before, last = last, self.versions()
            return before == last

        wait_for(is_settled, DEADLINE_SECONDS, lambda: f"writes go on: {last}")
        return last

    def workload(self, role: str, pool: str = "cpu", revision: str | None = None) -> str:
        """Name of a StatefulSet of the newest spec, or of another revision."""
        return f"{self.name}-{role}-{pool}-{revision or self.revision}"

    def replicas(self, role: str) -> int | None:
        """spec.replicas of the StatefulSet of a role's pool; None = there is none."""
        found = self.api.get(self.path("StatefulSet", self.workload(role)))
        return None if found is None else found["spec"]["replicas"]


def _is_child(body: Body) -> bool:
    return any(
        reference["kind"] == "PDCluster"
        for reference in body["metadata"].get("ownerReferences", ())
    )
