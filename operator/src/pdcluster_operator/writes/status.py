"""Write a status: once, and as a whole; the caller has seen that it differs.

No resourceVersion is needed, since we are the only writer; but a status is only
written to the object that it was made for, not to another of its name.
"""

from collections.abc import Mapping
from typing import Any

from pdcluster_api.apiserver.body import Body
from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ConflictError, NotFoundError
from pdcluster_api.apiserver.kinds import Kind


async def write_status(
    client: ApiClient, kind: Kind, live: Mapping[str, Any], status: Mapping[str, Any]
) -> Body | None:
    """Make the status of a live body equal to the given one.

    Returns the object as the API server has it now; None when it is gone, or is another one now.
    """
    metadata = live["metadata"]
    operations = [
        {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
        {"op": "add", "path": "/status", "value": status},  # replaces what is there
    ]
    try:
        return await client.json_patch(
            kind, metadata["namespace"], metadata["name"], operations, subresource="status"
        )
    except (NotFoundError, ConflictError):
        return None
