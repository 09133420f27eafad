"""Rights of every pod that we render on its node: none.  Meets the `restricted` standard."""

from pdcluster_api.manifests.objects import USER, Manifest


def pod_security() -> Manifest:
    """securityContext of a pod: our user, whose group owns the pod's own volumes."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        # a large volume is not walked again at every start
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Manifest:
    """securityContext of a container: no way to more rights, and no writing outside of its
    volumes.
    """
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
