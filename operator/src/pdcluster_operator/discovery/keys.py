"""etcd keys of docs/architecture.md's contract; the worker builds the same ones (`tests/contract`)."""


def cluster_prefix(namespace: str, name: str) -> str:
    """Below it: all that belongs to one cluster."""
    return f"/pdcluster/{namespace}/{name}/"


def workers_prefix(namespace: str, name: str, revision: str) -> str:
    """Below it: the leased record of every worker of one revision."""
    return f"/pdcluster/{namespace}/{name}/workers/{revision}/"


def worker_key(prefix: str, role: str, pool: str, pod: str) -> str:
    """The record of one worker, below `workers_prefix`."""
    return f"{prefix}{role}/{pool}/{pod}"


def command_key(namespace: str, name: str, pod: str) -> str:
    """Present = that worker drains, absent = it serves."""
    return f"/pdcluster/{namespace}/{name}/commands/{pod}"
