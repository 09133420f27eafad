"""`python -m e2e.rig up | node | down`: start the test cluster and leave it up, give it a second
node, or remove both.
"""

import sys

from e2e.rig import removal
from e2e.rig.paths import CACHE, IMAGES, REPOSITORY, Cluster, chart_settings
from e2e.rig.shell import CommandError

USAGE = "usage: python -m e2e.rig up | node | down"


def main(arguments: list[str]) -> int:
    local = Cluster()
    try:
        match arguments:
            case ["up"]:
                from e2e.rig import cluster  # needs .venv, and ending it does not

                cluster.up(local)
                print(_how_to_use(local))
            case ["node"]:
                from e2e.rig import cluster

                cluster.add_node(local)
            case ["down"]:
                removal.down(local)
            case _:
                print(USAGE, file=sys.stderr)
                return 2
    except CommandError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


def _how_to_use(local: Cluster) -> str:
    settings = " \\\n      ".join(chart_settings(IMAGES.tested))
    return f"""
The cluster is up: one node, no registry and no way out of it.

    export KUBECONFIG={local.kubeconfig}
    export PATH={CACHE.kubernetes}:{REPOSITORY}/.venv/bin:$PATH     # kubectl; helm and pdctl
    kubectl get pods --all-namespaces

The operator, and a PDCluster of the sample model:

    helm install pdcluster charts/pdcluster --namespace pdcluster-system --create-namespace \\
      {settings}
    kubectl apply -f examples/chat.yaml

Images:  {" ".join(IMAGES.loaded)}
Model:   PersistentVolumeClaim `models` in namespace default, folder {CACHE.model.name}
Logs:    {local.log}
Remove:  make cluster-down
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
