"""Placement of the workers of a PDCluster, and how fast KV has to move there."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pdcluster_schema.rules import rule
from pdcluster_schema.section import SpecSection
from pdcluster_schema.values import Text


class PlacementSpec(SpecSection):
    """Keep all workers of a revision on nodes with one value of a label, such as a rack.

    min_transfer_gbps: 10**9 bytes per second, below which KVTransferVerified is False
    """

    domain_label: Text | None = None
    mode: Literal["Required", "Preferred"] = "Preferred"
    min_transfer_gbps: Annotated[float, Field(gt=0.0, le=10000.0)] | None = Field(
        default=None, alias="minTransferGBps"
    )

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.domain_label is None and self.min_transfer_gbps is None:
            raise rule("says nothing", "give domainLabel, minTransferGBps or both, or remove it")
        return self
