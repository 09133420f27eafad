"""Objects such as the operator makes, of every kind, with values that the API server stores in
another form than they are written.
"""

from typing import Any

from pdcluster_schema.labels import SEEN_REPLICAS, cluster_labels

Manifest = dict[str, Any]
NAME = "chat"
WORKLOAD = "chat-decode-cpu-0123abcd"


def owner_reference(uid: str) -> Manifest:
    return {
        "apiVersion": "pdcluster.io/v1alpha1",
        "kind": "PDCluster",
        "name": NAME,
        "uid": uid,
        "controller": True,
    }


def manifest(kind: str, api_version: str, name: str, owner: Manifest, **content: Any) -> Manifest:
    """One child of the PDCluster `owner`, a body."""
    metadata = {
        "name": name,
        "namespace": owner["metadata"]["namespace"],
        "labels": cluster_labels(NAME, "decode"),
        "ownerReferences": [owner_reference(owner["metadata"]["uid"])],
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


def service_account(owner: Manifest) -> Manifest:
    return manifest("ServiceAccount", "v1", NAME, owner, automountServiceAccountToken=False)


def secret(owner: Manifest) -> Manifest:
    return manifest(
        "Secret", "v1", "chat-tls", owner, stringData={"tls.crt": "certificate"}, type="Opaque"
    )


def config_map(owner: Manifest, text: str = "offload: {}\n") -> Manifest:
    return manifest("ConfigMap", "v1", "chat-policy", owner, data={"policy.yaml": text})


def engine_config_map(owner: Manifest, text: str = "role: decode\n") -> Manifest:
    return manifest("ConfigMap", "v1", WORKLOAD, owner, data={"engine.yaml": text}, immutable=True)


def record(owner: Manifest) -> Manifest:
    return manifest(
        "ControllerRevision",
        "apps/v1",
        WORKLOAD,
        owner,
        revision=1,
        data={"statefulSet": {"spec": {"a": [1, 2]}}, "empty": {}},
    )


def network_policy(owner: Manifest) -> Manifest:
    peers = [{"podSelector": {"matchLabels": {"pdcluster.io/cluster": NAME}}}]
    rules = [
        {"ports": [{"port": 8000}]},
        {"from": peers, "ports": [{"port": "grpc", "protocol": "TCP"}, {"port": 9100}]},
    ]
    spec = {
        "podSelector": {"matchLabels": {"pdcluster.io/cluster": NAME}},
        "policyTypes": ["Ingress"],
        "ingress": rules,
    }
    return manifest("NetworkPolicy", "networking.k8s.io/v1", NAME, owner, spec=spec)


def disruption_budget(owner: Manifest) -> Manifest:
    spec = {
        "maxUnavailable": 1,
        "selector": {"matchLabels": {"pdcluster.io/cluster": NAME}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return manifest("PodDisruptionBudget", "policy/v1", "chat-decode-cpu", owner, spec=spec)


def scaler(owner: Manifest, replicas: int = 1, seen: int = 1) -> Manifest:
    spec = {"cluster": NAME, "role": "decode", "pool": "cpu", "replicas": replicas}
    made = manifest("PDPoolScaler", "pdcluster.io/v1alpha1", "chat-decode-cpu", owner, spec=spec)
    made["metadata"]["annotations"] = {SEEN_REPLICAS: str(seen)}
    return made


def ingress_service(owner: Manifest, revision: str = "0123abcd") -> Manifest:
    spec = {
        "type": "ClusterIP",
        "selector": {"pdcluster.io/cluster": NAME, "pdcluster.io/revision": revision},
        "ports": [{"name": "http", "port": 8000, "targetPort": "http"}],
    }
    return manifest("Service", "v1", NAME, owner, spec=spec)


def headless_service(owner: Manifest) -> Manifest:
    ports = [{"name": "grpc", "port": 9000, "protocol": "TCP"}, {"name": "kv", "port": 9100}]
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"pdcluster.io/cluster": NAME},
        "ports": ports,
    }
    return manifest("Service", "v1", "chat-workers", owner, spec=spec)


def stateful_set(owner: Manifest, replicas: int = 1) -> Manifest:
    """With what is stored in another form: amounts, empty and false values, defaults inside lists,
    nulls.
    """
    labels = {"pdcluster.io/cluster": NAME, "pdcluster.io/revision": "0123abcd"}
    spec = {
        "replicas": replicas,
        "podManagementPolicy": "Parallel",
        "serviceName": "chat-workers",
        "selector": {"matchLabels": labels},
        "updateStrategy": {"type": "OnDelete"},
        "template": {
            "metadata": {"labels": labels, "annotations": {"example.com/type": "cpu"}},
            "spec": _pod_spec(),
        },
    }
    return manifest("StatefulSet", "apps/v1", WORKLOAD, owner, spec=spec)


def stateful_set_with_storage(owner: Manifest) -> Manifest:
    made = stateful_set(owner)
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1024Mi"}}}
    made["spec"]["volumeClaimTemplates"] = [{"metadata": {"name": "data"}, "spec": claim}]
    made["spec"]["persistentVolumeClaimRetentionPolicy"] = {
        "whenDeleted": "Delete",
        "whenScaled": "Delete",
    }
    made["metadata"]["name"] = "chat-etcd"
    return made


def everything(owner: Manifest) -> list[Manifest]:
    """One of each, and more where a kind has several shapes."""
    makers = (
        *(
            service_account,
            secret,
            config_map,
            engine_config_map,
            record,
            network_policy,
            disruption_budget,
            scaler,
        ),
        *(ingress_service, headless_service, stateful_set, stateful_set_with_storage),
    )
    return [make(owner) for make in makers]


def _pod_spec() -> Manifest:
    field = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    token = {
        "name": "TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "token", "key": "token", "optional": True}},
    }
    limit = {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}
    probe = {
        "httpGet": {"path": "/ready", "port": "http"},
        "periodSeconds": 5,
        "failureThreshold": 720,
    }
    worker = {
        "name": "worker",
        "image": "example/worker:1",
        "command": ["python", "-m", "pdcluster_worker"],
        "args": [],
        "env": [
            field,
            token,
            limit,
            {"name": "EMPTY", "value": ""},
            {"name": "PLAIN", "value": "1"},
        ],
        "ports": [
            {"name": "http", "containerPort": 8000},
            {"name": "grpc", "containerPort": 9000, "protocol": "TCP"},
        ],
        "resources": {
            "requests": {"cpu": 1, "memory": "1024Mi"},
            "limits": {"cpu": "1500m", "memory": "2147483648"},
        },
        "readinessProbe": probe,
        "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
        "securityContext": {
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [
            {"name": "engine", "mountPath": "/etc/pdcluster/engine", "readOnly": True},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    term = {
        "matchExpressions": [
            {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-B200"]}
        ]
    }
    return {
        "serviceAccountName": NAME,
        "automountServiceAccountToken": False,
        "hostNetwork": False,
        "priorityClassName": None,
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "terminationGracePeriodSeconds": 300,
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}
            }
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": {"pdcluster.io/cluster": NAME}},
            }
        ],
        "containers": [worker],
        "volumes": [
            {"name": "engine", "configMap": {"name": WORKLOAD}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "0.5Gi"}},
        ],
    }
