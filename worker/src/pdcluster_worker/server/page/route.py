"""Routes of the page: its files, which need no key and name nothing, and the overview, which does.

The overview is made at most once a second, however many browsers ask.
"""

from collections.abc import Callable
from hashlib import sha256
from html import escape
from pathlib import Path

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from pdcluster_worker.messages.overview import ClusterOverview
from pdcluster_worker.server.errors import ErrorReply
from pdcluster_worker.server.http.api_keys import OVERVIEW, PAGE_FOLDER
from pdcluster_worker.server.http.routes import ApiRoute

OVERVIEW_SECONDS = 1.0

_STATIC = Path(__file__).parent / "static"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HTML = ("text/html", "application/xhtml+xml")
_VARY = {"vary": "accept"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}


class _PageRoute(Route):
    """Other methods find nothing at /, as before there was a page."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return (match, child) if match is Match.FULL else (Match.NONE, {})


def page_routes(
    overview: Callable[[], ClusterOverview], model: str, clock: Callable[[], float]
) -> list[Route]:
    """overview: as `Backend.overview`.  model: its name, for browsers without JavaScript."""
    files = {
        path.name: _File(path.read_bytes(), _MEDIA_TYPES[path.suffix])
        for path in sorted(_STATIC.iterdir())
        if path.suffix != ".html"
    }
    text = (_STATIC / "index.html").read_text().replace("{{model}}", escape(model))
    index = _File(text.encode(), _MEDIA_TYPES[".html"])
    made, made_at = _File(b"", "application/json"), float("-inf")

    async def page(request: Request) -> Response:
        if not _takes_html(request):
            raise HTTPException(404, headers=_VARY)
        return index.answer(request, {**_HEADERS, **_VARY})

    def of_file(file: _File) -> Callable[[Request], object]:
        async def asset(request: Request) -> Response:
            return file.answer(request, _HEADERS)

        return asset

    async def cluster(request: Request) -> Response:
        nonlocal made, made_at
        if (now := clock()) - made_at >= OVERVIEW_SECONDS:
            made, made_at = _File(msgspec.json.encode(overview()), "application/json"), now
        return made.answer(request, {})

    return [
        _PageRoute("/", page),
        *(Route(f"{PAGE_FOLDER}{name}", of_file(file)) for name, file in files.items()),
        ApiRoute(OVERVIEW, cluster, {200: ClusterOverview, 401: ErrorReply, 503: ErrorReply}),
    ]


class _File:
    def __init__(self, content: bytes, media_type: str) -> None:
        self._content = content
        self._media_type = media_type
        self._etag = f'"{sha256(content).hexdigest()[:20]}"'

    def answer(self, request: Request, headers: dict[str, str]) -> Response:
        """304 to a client that has it already."""
        known = {each.strip() for each in request.headers.get("if-none-match", "").split(",")}
        headers = {**headers, "etag": self._etag, "cache-control": "private, no-cache"}
        if {"*", self._etag, f"W/{self._etag}"} & known:
            return Response(status_code=304, headers=headers)
        return Response(self._content, headers=headers, media_type=self._media_type)


def _takes_html(request: Request) -> bool:
    """HTML is named, and not by `q=0`."""
    for each in ",".join(request.headers.getlist("accept")).split(","):
        name, *parameters = (part.strip().lower() for part in each.split(";"))
        weights = [part.removeprefix("q=") for part in parameters if part.startswith("q=")]
        if name in _HTML and all(map(_is_above_0, weights)):
            return True
    return False


def _is_above_0(weight: str) -> bool:
    try:
        return float(weight) > 0
    except ValueError:  # as good as none
        return True
