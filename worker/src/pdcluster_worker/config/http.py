"""The policy of the HTTP port: which web pages may call it (CORS), and what a client
may hold open.
"""

from typing import Annotated, Literal

import msgspec

from pdcluster_worker.config.section import PolicySection

ANY = "*"

Origin = Annotated[
    str,
    msgspec.Meta(max_length=256, pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^\s/*,?#]+)$"),
]
HeaderName = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$")]
Method = Literal["GET", "HEAD", "POST", "DELETE"]
MAX_ORIGINS = 64
MAX_HEADER_NAMES = 64

METHODS: list[Method] = ["GET", "HEAD", "POST", "DELETE"]


class CorsPolicy(PolicySection, frozen=True):
    """Rights that browsers give to pages of other origins, which they ask for here (Fetch
    standard).

    allowed_origins:   as a browser sends them, or *; none = no page of another origin
    allowed_headers:   that such a page may send; * = whichever it asks for
    allow_credentials: its cookies and stored passwords may come with requests; never beside *
    max_age_seconds:   for which a browser may remember the answer
    """

    allowed_origins: Annotated[list[Origin], msgspec.Meta(max_length=MAX_ORIGINS)] = msgspec.field(
        default_factory=list
    )
    allowed_methods: Annotated[list[Method], msgspec.Meta(max_length=4)] = msgspec.field(
        default_factory=METHODS.copy
    )
    allowed_headers: Annotated[list[HeaderName], msgspec.Meta(max_length=MAX_HEADER_NAMES)] = (
        msgspec.field(default_factory=[ANY].copy)
    )
    allow_credentials: bool = False
    max_age_seconds: Annotated[int, msgspec.Meta(ge=0, le=86_400)] = 600

    def __post_init__(self) -> None:
        if self.allow_credentials and ANY in self.allowed_origins:
            raise ValueError(
                "cors: allowCredentials is not for every origin: name them in allowedOrigins in "
                "place of *"
            )


class HttpLimitsPolicy(PolicySection, frozen=True):
    """Bounds of one client: of its requests, and of the time that it may hold a connection open.

    max_header_bytes:   request line and header fields; trailers and the framing of chunks may have
                        as much again
    max_headers:        header fields
    header_seconds:     from the first byte of a request to the end of its header
    body_seconds:       from there to the end of the body, and a second more for each 64 KiB that
                        have come
    keep_alive_seconds: that a connection may wait for its next request, or its first
    """

    max_header_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1 << 20)] = 64 << 10
    max_headers: Annotated[int, msgspec.Meta(ge=16, le=2000)] = 128
    header_seconds: Annotated[int, msgspec.Meta(ge=1, le=600)] = 10
    body_seconds: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 10
    keep_alive_seconds: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 75
