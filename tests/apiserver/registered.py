"""Stands in for workers in etcd: pods that have started are registered there, drain and
change their role on command.
"""

import contextlib
import json
import threading
import time
from http.client import HTTPException
from types import TracebackType
from typing import Any, Self

import httpx

from pdcluster_schema import etcd_keys
from pdcluster_schema.labels import CLUSTER, POOL, REVISION, ROLE
from tests.apiserver.plain_api import Body, PlainApi
from tests.system.etcd_server import EtcdServer

TICK_SECONDS = 0.05


class Registered:
    """Keeps the records of a namespace's pods that have started, while it is entered.

    busy:    pods that have requests, and so stay draining; may be changed at any time
    leaving: pods with a drain command that report that they are not ready
    """

    def __init__(self, api: PlainApi, namespace: str, etcd: EtcdServer) -> None:
        self.busy: set[str] = set()
        self.leaving: set[str] = set()
        self._api, self._etcd, self._namespace = api, etcd, namespace
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def states(self, name: str) -> dict[str, str]:
        """States that the workers of a cluster report, by pod."""
        prefix = f"{etcd_keys.cluster_prefix(self._namespace, name)}workers/"
        return {
            key.rpartition("/")[2]: json.loads(value)["state"]
            for key, value in self._etcd.values(prefix).items()
        }

    def commands(self, name: str) -> set[str]:
        """Pods of a cluster with a drain command."""
        prefix = f"{etcd_keys.cluster_prefix(self._namespace, name)}commands/"
        keys = {key.removeprefix(prefix) for key in self._etcd.values(prefix)}
        return {key for key in keys if not key.endswith(etcd_keys.ROLE_SUFFIX)}

    def roles(self, name: str) -> dict[str, str]:
        """Roles that pods of a cluster are commanded to have."""
        prefix = f"{etcd_keys.cluster_prefix(self._namespace, name)}commands/"
        return {
            key.removeprefix(prefix).removesuffix(etcd_keys.ROLE_SUFFIX): value.decode()
            for key, value in self._etcd.values(prefix).items()
            if key.endswith(etcd_keys.ROLE_SUFFIX)
        }

    def _run(self) -> None:
        while not self._end.is_set():
            # one of the servers is away: read both again
            with contextlib.suppress(AssertionError, OSError, HTTPException, httpx.HTTPError):
                self._tick()
            time.sleep(TICK_SECONDS)

    def _tick(self) -> None:
        stored = self._etcd.values(f"/pdcluster/{self._namespace}/")
        pods = self._api.items(
            f"/api/v1/namespaces/{self._namespace}/pods?labelSelector={REVISION}"
        )
        found = {self._key(pod["metadata"], stored): pod for pod in pods}
        for key in {key for key in stored if "/workers/" in key} - set(found):
            self._etcd.delete(key)
        self.leaving = {key.rpartition("/")[2] for key in stored if "/commands/" in key} - {"role"}
        for key, pod in found.items():
            record = self._record(pod, stored)
            if record is not None and stored.get(key) != record.encode():
                self._etcd.put(key, record)

    def _record(self, pod: Body, stored: dict[str, bytes]) -> str | None:
        if not any(each.get("started") for each in pod["status"].get("containerStatuses", ())):
            return None
        metadata = pod["metadata"]
        is_told = (
            etcd_keys.command_key(self._namespace, metadata["labels"][CLUSTER], metadata["name"])
            in stored
        )
        return record_of(
            "ready" if not is_told else "draining" if metadata["name"] in self.busy else "drained",
            pod_role=metadata["labels"][ROLE] if self._role(metadata, stored) else None,
        )

    def _key(self, metadata: dict[str, Any], stored: dict[str, bytes]) -> str:
        marks = metadata["labels"]
        changed = {**marks, ROLE: self._role(metadata, stored) or marks[ROLE]}
        return record_key(self._namespace, {**metadata, "labels": changed})

    def _role(self, metadata: dict[str, Any], stored: dict[str, bytes]) -> str:
        """The other role that it is commanded to have; empty = none."""
        cluster = metadata["labels"][CLUSTER]
        key = etcd_keys.role_key(self._namespace, cluster, metadata["name"])
        return stored.get(key, b"").decode()


def record_key(namespace: str, metadata: dict[str, Any]) -> str:
    """Key of the worker of a pod."""
    marks = metadata["labels"]
    prefix = etcd_keys.workers_prefix(namespace, marks[CLUSTER], marks[REVISION])
    return etcd_keys.worker_key(prefix, marks[ROLE], marks[POOL], metadata["name"])


def record_of(state: str, disaggregation: Body | None = None, pod_role: str | None = None) -> str:
    """A record as far as the operator reads it."""
    addresses = {f"{kind}_address": "h:1" for kind in ("http", "grpc", "kv")}
    record = {"engine_id": "e1", "state": state, **addresses, "disaggregation": disaggregation}
    return json.dumps({**record, "pod_role": pod_role} if pod_role else record)
