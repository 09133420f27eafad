"""Placement of a PDCluster's workers: near each other, and all pods of one at once."""

from typing import Annotated, Literal

from pydantic import Field

from pdcluster_schema.section import Rule, SpecSection, spelled
from pdcluster_schema.sections import MAX_RESOURCE
from pdcluster_schema.values import Text


class PlacementSpec(SpecSection):
    """Keep all workers of a revision where KV moves fast, on nodes with one value of a label, such
    as a rack or an NVLink domain; a worker of several pods has one of its own choice.
    """

    domain_label: (
        Annotated[
            str,
            Field(max_length=MAX_RESOURCE),
            spelled(
                "([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?",
                "the key of a label",
                "write it like topology.kubernetes.io/zone",
            ),
        ]
        | None
    ) = None
    """Key of that label; by default workers may be on any nodes."""
    mode: Literal["Required", "Preferred", "Exclusive"] = "Preferred"
    """Required = a worker that finds no room there stays Pending; Preferred = it may go elsewhere;
    Exclusive = as Required, and no domain takes two workers of several pods.
    """
    min_transfer_gbps: Annotated[float, Field(gt=0.0, le=10000.0)] | None = Field(
        default=None, alias="minTransferGBps"
    )
    """Floor in 10^9 bytes per second: the condition KVTransferVerified is False while a verified
    transfer is slower; by default any rate will do. A verification moves some MiB, which is slower
    than a long prompt. A change makes no new revision.
    """

    gang: Literal["PodGroup", "Volcano"] | None = None
    """Nodes for all pods of a worker of several pods, or for none: by a PodGroup of its own, that
    of scheduler-plugins or of Volcano, whose CRD has to be installed. By default one by one.
    """
    queue: Annotated[Text, Field(max_length=253)] | None = None
    """Volcano's queue of those PodGroups; by default that of Volcano."""

    @property
    def of_groups(self) -> str:
        """Field that decides something for workers of several pods alone; empty = none is given."""
        if self.gang is not None:
            return "gang"
        return "mode" if self.mode == "Exclusive" else ""

    RULES = (
        Rule(
            cel="has(self.domainLabel) || has(self.minTransferGBps) || has(self.gang)",
            holds=lambda place: place.domain_label or place.gang or place.min_transfer_gbps,
            reason="says nothing",
            fix="give domainLabel, minTransferGBps or gang, or remove it",
        ),
        Rule(
            cel="!has(self.mode) || self.mode == 'Preferred' || has(self.domainLabel)",
            holds=lambda place: place.mode == "Preferred" or place.domain_label is not None,
            reason="is for domainLabel, which is left out",
            fix="give domainLabel, or leave mode out",
            at="mode",
        ),
        Rule(
            cel="!has(self.queue) || (has(self.gang) && self.gang == 'Volcano')",
            holds=lambda place: place.queue is None or place.gang == "Volcano",
            reason="is Volcano's, and gang is not Volcano",
            fix="set gang to Volcano, or remove queue",
            at="queue",
        ),
    )
