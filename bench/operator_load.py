"""PDClusters of the operator's bench, and their children."""

from dataclasses import dataclass
from pathlib import Path

import yaml

EXAMPLE = Path(__file__).parents[1] / "examples" / "chat.yaml"
NAMESPACE = "bench"
NUM_POOLS = 2
STATEFUL_SETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets"
CHILDREN = {
    STATEFUL_SETS: NUM_POOLS,
    f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments": 1,
    f"/api/v1/namespaces/{NAMESPACE}/services": 3,
}
"""Children of each PDCluster that are made last, all others before them; a worker of several pods
has two StatefulSets of its own.
"""


@dataclass(frozen=True)
class Load:
    """PDClusters to apply.  replicas: workers of each pool; pods: of each worker"""

    objects: int
    replicas: int = 1
    pods: int = 1

    @property
    def num_workers(self) -> int:
        return self.objects * NUM_POOLS * self.replicas

    def children(self) -> dict[str, int]:
        """By path, of all PDClusters."""
        number = {**CHILDREN}
        if self.pods > 1:
            number[STATEFUL_SETS] = 2 * NUM_POOLS * self.replicas
        return {path: each * self.objects for path, each in number.items()}

    def documents(self) -> list[str]:
        template = yaml.safe_load(EXAMPLE.read_text())
        for role in template["spec"]["roles"].values():
            role["pools"][0]["replicas"] = self.replicas
            if self.pods > 1:
                role["pools"][0]["podsPerReplica"] = self.pods
        if self.pods > 1:
            template["spec"]["engine"]["dataParallelSize"] = self.pods
        names = (f"chat-{number}" for number in range(self.objects))
        return [
            yaml.safe_dump({**template, "metadata": {"name": name, "namespace": NAMESPACE}})
            for name in names
        ]
