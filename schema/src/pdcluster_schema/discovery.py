"""`spec.discovery`: the etcd that holds the records of the workers."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pdcluster_schema.crd.keywords import Crd
from pdcluster_schema.quantity import Quantity
from pdcluster_schema.rules import rule
from pdcluster_schema.section import Many, SpecSection
from pdcluster_schema.values import Endpoint, ObjectName, Text

MAX_ENDPOINTS = 16


class StorageSpec(SpecSection):
    """A volume for each member of the one that is run; by default it keeps its data in memory, and
    the workers register again after a restart.
    """

    size: Quantity
    """Size of one volume, in bytes or as a quantity such as 2Gi."""
    class_name: Annotated[Text, Crd(maxLength=253)] | None = None
    """StorageClass; by default the cluster's own."""
    retain: bool = False
    """Keep the volumes when the PDCluster is deleted."""


class EtcdSpec(SpecSection):
    """The etcd that holds the workers' leased records; given endpoints, or one that is run for this
    cluster.
    """

    endpoints: Annotated[
        tuple[Endpoint, ...], Many, Field(max_length=MAX_ENDPOINTS), Crd(list_type="atomic")
    ] = ()
    """host:port of an etcd to use; by default one is run for this cluster. An IPv6 address is in
    brackets. One that is, or leads to, a loopback, link-local or metadata address is not asked.
    """
    tls_secret: ObjectName | None = None
    """A Secret with ca.crt, and tls.crt and tls.key if the etcd asks clients for a certificate; by
    default plain HTTP.
    """
    replicas: Annotated[Literal[1, 3], Crd(default=None)] = 1
    """Members of the one that is run. Default 1."""
    image: Text | None = None
    """Image of the one that is run; by default the operator's setting."""
    storage: StorageSpec | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tls_secret is not None and not self.endpoints:
            raise rule(
                "is for endpoints, and none are given",
                "give endpoints, or leave tlsSecret out",
                at="tlsSecret",
            )
        if self.storage is not None and self.endpoints:
            raise rule(
                "is for an etcd that is run here, and endpoints are given",
                "leave storage or endpoints out",
                at="storage",
            )
        if self.replicas > 1 and self.storage is None and not self.endpoints:
            raise rule(
                "3 members need storage: one that lost its data could not come back",
                "give storage, or replicas: 1",
                at="storage",
            )
        return self


class DiscoverySpec(SpecSection):
    """Discovery among the workers of a cluster."""

    etcd: EtcdSpec = EtcdSpec()
