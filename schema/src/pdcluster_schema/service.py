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
        r"\*|[a-z][a-z0-9+.-]*://[^\s/*,?#]+",
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
    """Service of an endpoint picker, which chooses a worker for each request of a gateway.

    failure_mode: of the gateway while the picker does not answer: any worker, or none
    """

    name: ObjectName
    port: Port = 9002
    failure_mode: Literal["FailOpen", "FailClose"] = "FailClose"


class CorsSpec(SpecSection):
    """Rights that browsers give to pages of other origins with the API.

    allowed_origins:   as a browser sends them, or *; none = no page of another origin
    allowed_headers:   that such a page may send; * = whichever it asks for
    allow_credentials: its cookies and stored passwords may come with requests; never beside *
    max_age_seconds:   for which a browser may remember the answer
    """

    allowed_origins: Annotated[tuple[Origin, ...], Many, Field(max_length=MAX_ORIGINS)] = ()
    allowed_methods: Annotated[tuple[Method, ...], Many, Field(max_length=4)] = (
        "GET",
        "HEAD",
        "POST",
        "DELETE",
    )
    allowed_headers: Annotated[tuple[HeaderName, ...], Many, Field(max_length=MAX_HEADER_NAMES)] = (
        ANY,
    )
    allow_credentials: bool = False
    max_age_seconds: Annotated[int, Field(ge=0, le=86_400)] = 600

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
    """Bounds of one client: of its requests, and of the time that it may hold a connection open.

    max_header_bytes:   request line and header fields; beyond it 431
    max_headers:        header fields; beyond it 431
    header_seconds:     from the first byte of a request to the end of its header; after it 408
    body_seconds:       from there to the end of the body, and a second more for each 64 KiB that
                        have come; after it 408
    keep_alive_seconds: that a connection may wait for its next request, or its first
    """

    max_header_bytes: Annotated[int, Field(ge=4096, le=1 << 20)] = 64 << 10
    max_headers: Annotated[int, Field(ge=16, le=2000)] = 128
    header_seconds: Annotated[int, Field(ge=1, le=600)] = 10
    body_seconds: Annotated[int, Field(ge=1, le=3600)] = 10
    keep_alive_seconds: Annotated[int, Field(ge=1, le=3600)] = 75
