"""Find the API server and our credentials: from a kubeconfig, or from the pod that we run in."""

from pathlib import Path

from yaml import YAMLError

from pdcluster_api.apiserver.connection import ApiConnection
from pdcluster_api.apiserver.kubernetes_client import (
    ConfigException,
    Configuration,
    load_incluster_config,
    load_kube_config,
)
from pdcluster_api.errors import StartError

MAX_CONNECTIONS = 32


async def connect(
    kubeconfig: Path | None,
    context: str | None = None,
    *,
    proxies: bool = True,
    connections: int = MAX_CONNECTIONS,
) -> ApiConnection:
    """Open a connection pool; None = with the ServiceAccount of this pod, whose token is read
    again.

    context: of the kubeconfig; None = its current one
    proxies: those of the environment count
    connections: most at a time; 0 = no bound

    Raises StartError (exit code 2) when the file, or the pod's account, cannot be used.
    """
    configuration = Configuration()
    configuration.connection_pool_maxsize = connections
    try:
        if kubeconfig is None:
            load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await load_kube_config(  # type: ignore[no-untyped-call]
                str(kubeconfig),
                context=context,
                client_configuration=configuration,
                persist_config=False,
            )
        return ApiConnection(configuration, proxies=proxies)
    # all that its reader raises of a wrong file
    except (ConfigException, YAMLError, OSError, ValueError, TypeError, KeyError) as e:
        source = (
            "not in a pod with a ServiceAccount"
            if kubeconfig is None
            else f"kubeconfig {kubeconfig} cannot be used"
        )
        raise StartError(
            f"{source}: {e}; set KUBECONFIG to a working file, or run in a pod", exit_code=2
        ) from e
