"""Check that the Secret with a cluster's API keys holds a key: without one every request is
refused. It is the user's and not watched, so it is read in each reconcile.
"""

from dataclasses import dataclass

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError, UnavailableError, failure_of
from pdcluster_api.apiserver.kinds import SECRET
from pdcluster_api.certificates.authority import StoredSecret
from pdcluster_api.plan.observed.state import Problem
from pdcluster_schema import conditions

KEY_SECRET_POLL_SECONDS = 15.0


@dataclass(frozen=True)
class KeySecret:
    """Reads such Secrets; never says a word of their content."""

    client: ApiClient

    async def fault(self, namespace: str, name: str | None) -> Problem | None:
        """Problem of a Secret without a usable key, or that cannot be read.  None = there is a key,
        or no Secret is named. Raises UnavailableError.
        """
        if name is None:
            return None
        try:
            secret = StoredSecret.of(await self.client.find(SECRET, namespace, name))
        except UnavailableError:
            raise
        except ClusterError as e:
            failure = failure_of(e, f"Secret {name}")
            return Problem(
                failure.reason,
                f"{failure.object} of service.apiKeySecret cannot be read: {failure.message}",
            )
        if secret is None:
            wrong = "does not exist: make it with a key in each of its values"
        elif not any(is_key(entry, value) for entry, value in secret.data.items()):
            wrong = "holds no key: give it one word of printable ASCII in each of its values"
        else:
            return None
        message = (
            f"Secret {name} of service.apiKeySecret {wrong}, or leave apiKeySecret out; until then "
            "every request is refused"
        )
        return Problem(conditions.CONFIGURATION_REFUSED, message)


def is_key(entry: str, value: bytes) -> bool:
    key = value.strip()
    return not entry.startswith(".") and bool(key) and all(33 <= byte <= 126 for byte in key)
