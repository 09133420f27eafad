"""Placement of the workers of a PDCluster, and how fast KV has to move there."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pdcluster_schema.rules import rule
from pdcluster_schema.section import SpecSection
from pdcluster_schema.values import Text


class PlacementSpec(SpecSection):
    """Keep all workers of a revision where KV moves fast, on nodes with one value of a label, such
    as a rack or an NVLink domain; and how fast it has to move.
    """

    domain_label: Text | None = None
    """Key of that label; by default workers may be on any nodes."""
    mode: Literal["Required", "Preferred"] = "Preferred"
    """Required = a worker that finds no room there stays Pending; Preferred = it may go elsewhere.
    """
    min_transfer_gbps: Annotated[float, Field(gt=0.0, le=10000.0)] | None = Field(
        default=None, alias="minTransferGBps"
    )
    """Floor in 10^9 bytes per second: the condition KVTransferVerified is False while a verified
    transfer is slower; by default any rate will do. A verification moves some MiB, which is slower
    than a long prompt. A change makes no new revision.
    """

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.domain_label is None and self.min_transfer_gbps is None:
            raise rule("says nothing", "give domainLabel, minTransferGBps or both, or remove it")
        return self
