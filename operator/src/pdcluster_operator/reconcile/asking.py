"""Ask a given etcd whether it answers, with the TLS files of its Secret."""

from dataclasses import dataclass

from pdcluster_operator.api.errors import EtcdUnreachableError
from pdcluster_operator.certificates.reading import Stored
from pdcluster_operator.cluster.client import ApiClient
from pdcluster_operator.cluster.errors import ClusterError
from pdcluster_operator.cluster.kinds import SECRET
from pdcluster_operator.discovery.etcd import EtcdTLS, check_reachable
from pdcluster_operator.reconcile.discovery import Question


@dataclass(frozen=True)
class Asking:
    """Reads the Secret anew each time: it is the user's, and not watched."""

    client: ApiClient

    async def ask(self, question: Question) -> str | None:
        """Why the etcd cannot be used; None = it answers."""
        try:
            await check_reachable(question.endpoints, await self._tls(question))
        except EtcdUnreachableError as e:
            return str(e)
        except ClusterError as e:
            return f"Secret {question.tls_secret} cannot be read: {e}"
        return None

    async def has_client_certificate(self, question: Question) -> bool | None:
        """Whether the Secret has one for the workers too; None = the Secret cannot be used."""
        try:
            tls = await self._tls(question)
        except (EtcdUnreachableError, ClusterError):
            return None
        return tls is not None and tls.certificate is not None

    async def _tls(self, question: Question) -> EtcdTLS | None:
        if question.tls_secret is None:
            return None
        secret = Stored.of(await self.client.find(SECRET, question.namespace, question.tls_secret))
        if secret is None:
            raise EtcdUnreachableError(
                f"Secret {question.tls_secret} does not exist: make it with ca.crt of the etcd, or leave tlsSecret out"
            )
        return EtcdTLS.of_secret(question.tls_secret, secret.data)
