"""Whether the Secret with a cluster's API keys holds any: without one every request is refused, and that is said.

The Secret is the user's and not watched: it is read in each pass over a
cluster that names one, and again soon while something is wrong with it.
"""

from dataclasses import dataclass

from pdcluster_operator.certificates.reading import Stored
from pdcluster_operator.cluster.client import ApiClient
from pdcluster_operator.cluster.errors import ClusterError, UnavailableError
from pdcluster_operator.cluster.kinds import SECRET

LOOK_AGAIN_SECONDS = 15.0


@dataclass(frozen=True)
class KeySecret:
    """Reads such Secrets; never says a word of their content."""

    client: ApiClient

    async def fault(self, namespace: str, name: str | None) -> str | None:
        """Why no client can have a key; None = some can, or no Secret is named.  Raises UnavailableError."""
        if name is None:
            return None
        try:
            secret = Stored.of(await self.client.find(SECRET, namespace, name))
        except UnavailableError:
            raise
        except ClusterError as e:
            return f"Secret {name} of service.apiKeySecret cannot be read: {e}"
        if secret is None:
            wrong = "does not exist: make it with a key in each of its values"
        elif not any(value.strip() for value in secret.data.values()):
            wrong = "holds no key: give it one in each of its values"
        else:
            return None
        return f"Secret {name} of service.apiKeySecret {wrong}, or leave apiKeySecret out; until then every request is refused"
