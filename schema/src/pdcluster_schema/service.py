"""The HTTP side of `spec.service`: which web pages may call the API, and what a client may hold
open.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pdcluster_schema.rules import rule, spelled
from pdcluster_schema.section import Many, SpecSection
from pdcluster_schema.values import ObjectName, Port

ANY = "*"
MAX_ORIGINS = 64
MAX_HEADER_NAMES = 64

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
    """Make an InferencePool of the workers that answer clients, with this endpoint picker, for
    gateways of the Gateway API Inference Extension, whose CRDs have to be installed. By default
    none is made.
    """

    name: ObjectName
    """Service of the endpoint picker, in the same namespace."""
    port: Port = 9002
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.allow_credentials and ANY in self.allowed_origins:
            reason, fix = (
                "is not for every origin",
                "name them in allowedOrigins in place of *, or leave it out",
            )
            raise rule(reason, fix, at="allowCredentials")
        return self


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
