"""etcd keys of docs/contracts.md."""

ROOT = "/pdcluster/"
"""Below it: all that belongs to any cluster."""


ROLE_SUFFIX = "/role"
"""A worker's role, below its command: an etcd's rights to commands are rights to it too."""


def cluster_prefix(namespace: str, name: str) -> str:
    """Below it: all that belongs to one cluster."""
    return f"{ROOT}{namespace}/{name}/"


def records_prefix(namespace: str, name: str) -> str:
    """Below it: the leased records of all workers of one cluster."""
    return f"{cluster_prefix(namespace, name)}workers/"


def commands_prefix(namespace: str, name: str) -> str:
    """Below it: the commands to the workers of one cluster."""
    return f"{cluster_prefix(namespace, name)}commands/"


def workers_prefix(namespace: str, name: str, revision: str) -> str:
    """Below it: the leased record of every worker of one revision."""
    return f"{records_prefix(namespace, name)}{revision}/"


def worker_key(prefix: str, role: str, pool: str, pod: str) -> str:
    """The record of one worker, below `workers_prefix`."""
    return f"{prefix}{role}/{pool}/{pod}"


def command_key(namespace: str, name: str, pod: str) -> str:
    """Present = that worker drains, absent = it serves."""
    return f"{commands_prefix(namespace, name)}{pod}"


def role_key(namespace: str, name: str, pod: str) -> str:
    """The role that this worker is to have; absent = its pod's."""
    return f"{command_key(namespace, name, pod)}{ROLE_SUFFIX}"


def dtype_key(namespace: str, name: str, revision: str) -> str:
    """The meaning of `dtype: auto` in a revision, written by its first worker."""
    return f"{cluster_prefix(namespace, name)}dtypes/{revision}"


def pod_of(key: str) -> str:
    return key.rpartition("/")[2]
