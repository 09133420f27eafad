"""Reads one PDCluster and its children through a kubeconfig."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from prometheus_client import CollectorRegistry
from yaml import YAMLError

from pdcluster_api.apiserver.client import ApiClient, ClientLimits
from pdcluster_api.apiserver.connection import (
    ApiMetrics,
    ConfigException,
    connect,
    list_kube_config_contexts,
)
from pdcluster_api.apiserver.errors import ClusterError, ForbiddenError
from pdcluster_api.apiserver.kinds import (
    CONTROLLER_REVISION,
    PDCLUSTER,
    POD,
    POOL_SCALER,
    SERVICE,
    STATEFUL_SET,
    Body,
)
from pdcluster_api.apiserver.observe import Live
from pdcluster_api.errors import StartError
from pdcluster_schema import labels

_LIMITS = ClientLimits(timeout_seconds=10.0, tries=2)
_CHILDREN = (STATEFUL_SET, POD, POOL_SCALER, CONTROLLER_REVISION, SERVICE)
Result = TypeVar("Result")


@dataclass(frozen=True)
class KubeContext:
    """None = kubectl's default: KUBECONFIG or ~/.kube/config, its current context and namespace."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None

    def file(self) -> Path:
        """One path, or several with ':' between them.  Raises StartError where none exists."""
        if self.has_file():
            return self._file()
        message = (
            f"no kubeconfig: there is no file {self._file()}; set KUBECONFIG, give --kubeconfig, "
            "or read a file instead"
        )
        raise StartError(message, exit_code=2)

    def has_file(self) -> bool:
        return any(Path(part).is_file() for part in str(self._file()).split(os.pathsep))

    def _file(self) -> Path:
        return self.kubeconfig or Path(
            os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config"
        )

    def in_namespace(self) -> str:
        """Raises StartError when the kubeconfig cannot be read or has no such context."""
        if self.namespace is not None:
            return self.namespace
        file = self.file()
        try:
            contexts, current = list_kube_config_contexts(str(file))  # type: ignore[no-untyped-call]
        except (ConfigException, YAMLError, OSError, ValueError, TypeError, KeyError) as e:
            raise StartError(
                f"kubeconfig {file} cannot be used: {e}; correct it, or give --kubeconfig",
                exit_code=2,
            ) from e
        chosen = (
            current
            if self.context is None
            else next((each for each in contexts if each["name"] == self.context), None)
        )
        if chosen is None:
            names = ", ".join(each["name"] for each in contexts)
            raise StartError(
                f"kubeconfig {file} has no context {self.context!r}; use one of {names}",
                exit_code=2,
            )
        return str(chosen.get("context", {}).get("namespace") or "default")


def read_object(kube_context: KubeContext, name: str) -> Body | None:
    namespace = kube_context.in_namespace()
    return with_client(kube_context, lambda client: client.find(PDCLUSTER, namespace, name))


def read_live(kube_context: KubeContext, name: str) -> Live | None:
    """None = no such PDCluster.  Raises StartError when the API server cannot be reached."""
    namespace = kube_context.in_namespace()

    async def read(client: ApiClient) -> Live | None:
        body = await client.find(PDCLUSTER, namespace, name)
        if body is None:
            return None
        children: list[Body] = []
        for kind in _CHILDREN:
            children += [
                child
                async for child in client.list(kind, namespace, labels=f"{labels.CLUSTER}={name}")
            ]
        return Live(body, children)

    return with_client(kube_context, read)


def with_client(
    kube_context: KubeContext, call: Callable[[ApiClient], Awaitable[Result]]
) -> Result:
    async def connected() -> Result:
        connection = await connect(kube_context.file(), kube_context.context)
        async with ApiClient(connection, ApiMetrics(CollectorRegistry()), _LIMITS) as client:
            return await call(client)

    try:
        return asyncio.run(connected())
    except ForbiddenError as e:
        raise StartError(f"{e}; ask for the right, or read a file instead", exit_code=1) from e
    except ClusterError as e:
        raise StartError(f"{e}; is the context the right one?", exit_code=1) from e
