"""Requests to a PDCluster's etcd with the TLS files of its Secret: worker records, commands."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError
from pdcluster_api.apiserver.kinds import POD, SECRET, Key
from pdcluster_api.certificates.authority import StoredSecret
from pdcluster_api.discovery.addresses import resolve
from pdcluster_api.discovery.commands import (
    Registered,
    StoredRecord,
    read_registered,
    remove_records,
    write_commands,
)
from pdcluster_api.discovery.etcd import Endpoint, EtcdTLS
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_api.manifests.worker_config import etcd_endpoints
from pdcluster_schema.pdcluster import PDCluster


@dataclass(frozen=True)
class EtcdTarget:
    """The etcd in which a PDCluster's workers are registered."""

    key: Key  # of the PDCluster, below whose keys everything is, and in whose namespace the Secret
    endpoints: tuple[str, ...]
    tls_secret: str | None = None  # None = it speaks no TLS
    is_external: bool = False  # it is the user's own, and not run for the cluster

    @classmethod
    def of(cls, cluster: PDCluster) -> "EtcdTarget":
        """The given etcd, or the one that is run for the cluster."""
        etcd = cluster.spec.discovery.etcd
        key = Key(cluster.metadata.namespace, cluster.metadata.name)
        return cls(key, etcd_endpoints(cluster), etcd.tls_secret, is_external=bool(etcd.endpoints))

    @property
    def silence(self) -> str:
        return f"etcd does not answer at {', '.join(self.endpoints)}"

    def __str__(self) -> str:
        return f"etcd at {', '.join(self.endpoints)}"


@dataclass(frozen=True)
class EtcdRequests:
    """Reads the Secret again each time: it is the user's, and not watched.

    may_be_loopback: a given etcd may be on this machine, as beside an operator outside of a pod
    Everything raises EtcdUnreachableError when etcd, or the Secret, cannot be used.
    """

    client: ApiClient
    may_be_loopback: bool = False

    async def has_client_certificate(self, target: EtcdTarget) -> bool | None:
        """True if the Secret has one for the workers too; None = it cannot be used."""
        try:
            tls = await self._tls(target)
        except EtcdUnreachableError:
            return None
        return tls is not None and tls.certificate is not None

    async def registered(self, target: EtcdTarget) -> Registered:
        tls = await self._tls(target)
        return await read_registered(await self._endpoints(target), *target.key, tls)

    async def command(
        self,
        target: EtcdTarget,
        drain: Mapping[str, datetime],
        serve: Collection[str],
        roles: Mapping[str, str | None] | None = None,
        graces: Mapping[str, int] | None = None,
    ) -> None:
        tls = await self._tls(target)
        endpoints = await self._endpoints(target)
        await write_commands(
            endpoints, *target.key, drain=drain, serve=serve, roles=roles, graces=graces, tls=tls
        )

    async def remove(self, target: EtcdTarget, records: Iterable[StoredRecord]) -> list[str]:
        """Remove unchanged records of pods that do not exist; returns those pods."""
        namespace = target.key.namespace
        dead = [each for each in records if not await self._exists(namespace, each.record.pod)]
        tls = await self._tls(target)
        return await remove_records(await self._endpoints(target), dead, tls)

    async def _exists(self, namespace: str, pod: str) -> bool:
        """By a list, to which watching gives the right."""
        async for _ in self.client.list(POD, namespace, fields=f"metadata.name={pod}"):
            return True
        return False

    async def _endpoints(self, target: EtcdTarget) -> Sequence[Endpoint]:
        """Those of a user where they lead, which is judged; our own as they are."""
        if not target.is_external:
            return target.endpoints
        found = [
            await resolve(each, may_be_loopback=self.may_be_loopback) for each in target.endpoints
        ]
        endpoints = [each for each in found if each is not None]
        if not endpoints:
            raise EtcdUnreachableError(target.silence, "no endpoint has an address")
        return endpoints

    async def _tls(self, target: EtcdTarget) -> EtcdTLS | None:
        if target.tls_secret is None:
            return None
        try:
            body = await self.client.find(SECRET, target.key.namespace, target.tls_secret)
        except ClusterError as e:
            raise EtcdUnreachableError(f"Secret {target.tls_secret} cannot be read: {e}") from e
        secret = StoredSecret.of(body)
        if secret is None:
            raise EtcdUnreachableError(
                f"Secret {target.tls_secret} does not exist: make it with ca.crt of the etcd, or "
                "leave tlsSecret out"
            )
        return EtcdTLS.of_secret(target.tls_secret, secret.data)
