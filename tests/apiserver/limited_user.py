"""A user with some rights only, as an operator that was installed with too few."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.apiserver.control_plane import ControlPlane
from tests.apiserver.plain_api import Body, PlainApi

RBAC = "/apis/rbac.authorization.k8s.io/v1"
GROUPS = ("apps", "networking.k8s.io", "events.k8s.io", "policy")


class LimitedUser:
    """Has what its ClusterRole says, which may be changed at any time."""

    def __init__(self, control_plane: ControlPlane, name: str) -> None:
        self.kubeconfig: Path = control_plane.kubeconfig_for(name)
        self._api, self._name = PlainApi(control_plane.kubeconfig), name

    def may(self, rules: Sequence[Body]) -> None:
        """From now on, these."""
        self._api.merge(f"{RBAC}/clusterroles/{self._name}", {"rules": rules})

    def make(self, rules: Sequence[Body]) -> None:
        """Give it its first rights."""
        names = {"apiVersion": RBAC.removeprefix("/apis/"), "metadata": {"name": self._name}}
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": self._name}
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": self._name}
        self._api.create(f"{RBAC}/clusterroles", {**names, "kind": "ClusterRole", "rules": rules})
        self._api.create(
            f"{RBAC}/clusterrolebindings",
            {**names, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": [subject]},
        )

    def remove(self) -> None:
        """Take all rights away."""
        for kind in ("clusterrolebindings", "clusterroles"):
            self._api.delete(f"{RBAC}/{kind}/{self._name}")


def all_of(*groups: str, resources: Sequence[str] = ("*",)) -> Body:
    """A rule: every verb on these."""
    return {"apiGroups": groups, "resources": resources, "verbs": ["*"]}


@contextmanager
def limited_user(
    control_plane: ControlPlane, name: str, rules: Sequence[Body]
) -> Iterator[LimitedUser]:
    """It has its rights while this is entered."""
    user = LimitedUser(control_plane, name)
    user.make(rules)
    try:
        yield user
    finally:
        user.remove()
