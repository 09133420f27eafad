"""Policy of the HTTP port: CORS, and limits of a client."""

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
    """Cross-origin rights (Fetch standard); * = any."""

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
    # trailers may have as much again
    max_header_bytes: Annotated[int, msgspec.Meta(ge=4096, le=1 << 20)] = 64 << 10
    max_headers: Annotated[int, msgspec.Meta(ge=16, le=2000)] = 128
    header_seconds: Annotated[int, msgspec.Meta(ge=1, le=600)] = 10  # from the first byte
    body_seconds: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 10  # plus 1 s per 64 KiB
    keep_alive_seconds: Annotated[int, msgspec.Meta(ge=1, le=3600)] = 75
