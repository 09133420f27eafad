"""Names: what a name may look like, and what workloads are called.

One function builds each name, so that no two places can disagree.
"""

import re

from pdcluster_schema.rules import rule

# a StatefulSet's pods carry its name and a revision hash in one 63-character label
MAX_WORKLOAD_NAME = 52
REVISION_LENGTH = 8
_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def dns_label(value: str) -> str:
    """Accept a DNS-1123 label that starts with a letter (Services need that); raises a rule error
    otherwise.
    """
    if _LABEL.fullmatch(value) is None:
        raise rule(
            f"{value!r} is not a name that Kubernetes takes",
            "use at most 63 lower-case letters, digits and '-', starting with a letter and ending "
            "with a letter or digit",
        )
    return value


def workload_name(cluster: str, role: str, pool: str, revision: str) -> str:
    """Name of the workload of one role, pool and revision."""
    return f"{cluster}-{role}-{pool}-{revision}"


def process_name(cluster: str, role: str, pool: str, ordinal: int) -> str:
    """Name of one worker process on a single machine."""
    return f"{cluster}-{role}-{pool}-{ordinal}"
