"""`metadata` of a PDCluster, as far as it is read."""

from typing import Annotated

from pydantic import Field

from pdcluster_schema.rules import spelled
from pdcluster_schema.section import SpecSection
from pdcluster_schema.values import Name


class Metadata(SpecSection):
    """Name and namespace of the object; labels and annotations are the user's own."""

    name: Name
    namespace: Annotated[
        str,
        spelled(
            r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?",
            "a namespace",
            "use at most 63 lower-case letters, digits and '-'",
        ),
    ] = "default"
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
