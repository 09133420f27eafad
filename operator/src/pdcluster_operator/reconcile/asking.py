"""Requests to an etcd with the TLS files of its Secret: reachability, worker records, drain
commands.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from pdcluster_api.apiserver.body import Key
from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError
from pdcluster_api.apiserver.kinds import POD, SECRET
from pdcluster_api.certificates.reading import Stored
from pdcluster_api.discovery.commands import Registered, StoredRecord, read_registered, remove_records, write_commands
from pdcluster_api.discovery.etcd import EtcdTLS, check_reachable
from pdcluster_api.errors import EtcdUnreachableError
from pdcluster_operator.reconcile.discovery import Question


@dataclass(frozen=True)
class Asking:
    """Reads the Secret again each time: it is the user's, and not watched."""

    client: ApiClient

    async def ask(self, question: Question) -> str | None:
        """Error why the etcd cannot be used; None = it answers."""
        try:
            await check_reachable(question.endpoints, question.prefix, await self._tls(question))
        except EtcdUnreachableError as e:
            return str(e)
        except ClusterError as e:
            return f"Secret {question.tls_secret} cannot be read: {e}"
        return None

    async def has_client_certificate(self, question: Question) -> bool | None:
        """Return whether the Secret has one for the workers too; None = the Secret cannot be
        used.
        """
        try:
            tls = await self._tls(question)
        except (EtcdUnreachableError, ClusterError):
            return None
        return tls is not None and tls.certificate is not None

    async def registered(self, question: Question, key: Key) -> Registered:
        """Records and commands of a cluster.  Raises EtcdUnreachableError, ClusterError."""
        return await read_registered(question.endpoints, key.namespace, key.name, await self._tls(question))

    async def command(self, question: Question, key: Key, drain: Mapping[str, datetime], serve: Collection[str]) -> None:
        """Write drain commands for pods, and remove those of others.

        Raises EtcdUnreachableError, ClusterError.
        """
        tls = await self._tls(question)
        await write_commands(question.endpoints, key.namespace, key.name, drain=drain, serve=serve, tls=tls)

    async def remove(self, question: Question, key: Key, records: Iterable[StoredRecord]) -> list[str]:
        """Remove unchanged records of pods that the API server does not know; returns those pods.

        Raises EtcdUnreachableError, ClusterError.
        """
        dead = [stored for stored in records if not await self._is_there(key.namespace, stored.record.pod)]
        return await remove_records(question.endpoints, dead, await self._tls(question))

    async def _is_there(self, namespace: str, pod: str) -> bool:
        """By a list, to which watching gives the right."""
        async for _ in self.client.list(POD, namespace, fields=f"metadata.name={pod}"):
            return True
        return False

    async def _tls(self, question: Question) -> EtcdTLS | None:
        if question.tls_secret is None:
            return None
        secret = Stored.of(await self.client.find(SECRET, question.namespace, question.tls_secret))
        if secret is None:
            raise EtcdUnreachableError(
                f"Secret {question.tls_secret} does not exist: make it with ca.crt of the etcd, or leave tlsSecret out"
            )
        return EtcdTLS.of_secret(question.tls_secret, secret.data)
