"""Addresses of a cluster, for clients and between workers: `spec.service`, `spec.discovery`."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from pdcluster_schema.ports import HTTP_PORT, PICKER_PORT
from pdcluster_schema.quantities import Quantity
from pdcluster_schema.section import Cel, Crd, Many, Rule, SpecSection, spelled
from pdcluster_schema.values import Endpoint, ObjectName, Port, Text

ANY = "*"
MAX_ORIGINS = 64
MAX_HEADER_NAMES = 64
MAX_MODELS = 16

Method = Literal["GET", "HEAD", "POST", "DELETE"]
Origin = Annotated[
    str,
    Field(max_length=256),
    spelled(
        r"([*]|[a-z][a-z0-9+.-]*://[^\s/*,?#]+)",
        "an origin",
        "write it as a browser sends it, like https://chat.example.com, without a path; or * for "
        "all",
    ),
]
HeaderName = Annotated[
    str,
    Field(max_length=64),
    spelled(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", "a header's name", "write it like authorization"),
]


class EndpointPickerSpec(SpecSection):
    """Make an InferencePool with this endpoint picker, for gateways of the Gateway API Inference
    Extension, whose CRDs have to be installed: of the workers that answer clients; with the
    cluster's own pickers of the decode or mixed ones. By default none is made.
    """

    name: ObjectName | None = None
    """Service of another endpoint picker, in the same namespace; by default the cluster's own,
    which roles.picker runs and routing.relaying rules.
    """
    port: Port = PICKER_PORT
    """Its gRPC port."""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailClose"
    """Behaviour of the gateway while the picker does not answer; FailOpen = any worker takes the
    request.
    """


class CorsSpec(SpecSection):
    """Use of the API by web pages of other origins, as browsers allow it. By default none. Takes
    effect without a restart.
    """

    allowed_origins: Annotated[tuple[Origin, ...], Many, Field(max_length=MAX_ORIGINS)] = ()
    """Origins as browsers send them, such as https://chat.example.com, without a path; or * for
    all.
    """
    allowed_methods: Annotated[tuple[Method, ...], Many, Field(max_length=4)] = (
        "GET",
        "HEAD",
        "POST",
        "DELETE",
    )
    """Methods that such a page may use. By default all."""
    allowed_headers: Annotated[tuple[HeaderName, ...], Many, Field(max_length=MAX_HEADER_NAMES)] = (
        ANY,
    )
    """Headers that such a page may send. By default *, whichever it asks for."""
    allow_credentials: bool = False
    """Let a browser send its cookies and stored passwords too; never beside *. API keys do not need
    it.
    """
    max_age_seconds: Annotated[int, Field(ge=0, le=86_400)] = 600
    """Time for which a browser may remember what it was allowed."""

    RULES = (
        Rule(
            cel="!has(self.allowCredentials) || !self.allowCredentials || "
            "!has(self.allowedOrigins) || !('*' in self.allowedOrigins)",
            holds=lambda cors: not cors.allow_credentials or ANY not in cors.allowed_origins,
            reason="is not for every origin",
            fix="name them in allowedOrigins in place of *, or leave it out",
            at="allowCredentials",
        ),
    )


class HttpLimitsSpec(SpecSection):
    """Limits of the requests and connections of one client. Takes effect without a restart."""

    max_header_bytes: Annotated[int, Field(ge=4096, le=1 << 20)] = 64 << 10
    """Bytes of a request line and its header fields; beyond it 431."""
    max_headers: Annotated[int, Field(ge=16, le=2000)] = 128
    """Header fields of a request; beyond it 431."""
    header_seconds: Annotated[int, Field(ge=1, le=600)] = 10
    """Time for a header to come whole; after it 408."""
    body_seconds: Annotated[int, Field(ge=1, le=3600)] = 10
    """Time for a body to come whole, and a second more for each 64 KiB that have come; after it
    408.
    """
    keep_alive_seconds: Annotated[int, Field(ge=1, le=3600)] = 75
    """Time that a connection may wait for a request; then it is closed."""


class OtherModelSpec(SpecSection):
    """A model of another PDCluster, whose requests are handed on to the Service of that one."""

    name: Annotated[Text, Field(max_length=253)]
    """Name by which clients call it here: that PDCluster's model.name, or an adapter of it."""
    cluster: ObjectName
    """The PDCluster that serves it, in the same namespace."""
    port: Port = HTTP_PORT
    """Port of that one's Service."""


class ServiceSpec(SpecSection):
    """Service of the OpenAI API."""

    port: Port = HTTP_PORT
    """HTTP port of the Service."""
    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Type of the Service."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the Service, for a load balancer."""
    api_key_secret: ObjectName | None = None
    """A Secret each of whose values is a key that clients may present as `Authorization: Bearer`;
    by default no key is asked for.
    """
    shared_prefix_cache: bool = False
    """Let all API keys share cached KV blocks. By default each key has its own: with a shared cache
    the holder of one key can find out, by `cached_tokens` and by time, how prompts of another
    begin. Takes effect without a restart.
    """
    cors: CorsSpec = CorsSpec()
    limits: HttpLimitsSpec = HttpLimitsSpec()
    models: Annotated[
        tuple[OtherModelSpec, ...],
        Many,
        Field(max_length=MAX_MODELS),
        Crd(list_type="map", list_map_keys=["name"]),
    ] = ()
    """Models of other PDClusters that this address serves too. By default none. Takes effect
    without a restart.
    """
    endpoint_picker: EndpointPickerSpec | None = None

    @property
    def has_own_picker(self) -> bool:
        return self.endpoint_picker is not None and self.endpoint_picker.name is None


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

    RULES = (
        Rule(
            cel="!has(self.tlsSecret) || size(self.?endpoints.orValue([])) > 0",
            holds=lambda etcd: etcd.tls_secret is None or etcd.endpoints,
            reason="is for endpoints, and none are given",
            fix="give endpoints, or leave tlsSecret out",
            at="tlsSecret",
        ),
        Rule(
            cel="!has(self.storage) || size(self.?endpoints.orValue([])) == 0",
            holds=lambda etcd: etcd.storage is None or not etcd.endpoints,
            reason="is for an etcd that is run here, and endpoints are given",
            fix="leave storage or endpoints out",
            at="storage",
        ),
        Rule(
            cel="self.?replicas.orValue(1) == 1 || has(self.storage) || "
            "size(self.?endpoints.orValue([])) > 0",
            holds=lambda etcd: etcd.replicas == 1 or etcd.storage or etcd.endpoints,
            reason="is needed by 3 members: one that lost its data could not come back",
            fix="give storage, or replicas: 1",
            at="storage",
        ),
    )


class DiscoverySpec(SpecSection):
    """Discovery among the workers of a cluster."""

    etcd: EtcdSpec = EtcdSpec()


def discovery_rules() -> Iterator[Cel]:
    """Rules of the spec, since the section may be left out."""
    endpoints = "(size({}.?discovery.?etcd.?endpoints.orValue([])) > 0)"
    yield Cel(
        f"{endpoints.format('self')} == {endpoints.format('oldSelf')}",
        "an etcd of your own (discovery.etcd.endpoints) and one that is run for the cluster cannot "
        "be exchanged for each other: make a new PDCluster",
        ".discovery",
    )
    replicas = "{}.?discovery.?etcd.?replicas.orValue(1)"
    yield Cel(
        f"{replicas.format('self')} == {replicas.format('oldSelf')}",
        "discovery.etcd.replicas cannot change: make a new PDCluster",
        ".discovery",
    )
    storage = "has({0}.discovery) && has({0}.discovery.etcd) && has({0}.discovery.etcd.storage)"
    now, before = "self.discovery.etcd.storage", "oldSelf.discovery.etcd.storage"
    yield Cel(
        f"!({storage.format('self')}) ? !({storage.format('oldSelf')}) : "
        f"{storage.format('oldSelf')} && {now}.size == {before}.size && "
        f"(has({now}.className) ? {now}.className : '') == "
        f"(has({before}.className) ? {before}.className : '') && {now}.retain == {before}.retain",
        "discovery.etcd.storage cannot change: make a new PDCluster",
        ".discovery",
    )
