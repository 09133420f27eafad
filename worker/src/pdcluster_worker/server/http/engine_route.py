"""GET /engine/health: whether the container of a stock engine is to be restarted, for its probe.

It is about the engine alone: a worker that drains, or whose etcd is away, has a well
engine.  200 while there is nothing against it, 503 with the reason otherwise.
"""

from collections.abc import Callable

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse

PATH = "/engine/health"


def add_engine_health(app: FastAPI, fault: Callable[[], str | None]) -> None:
    """Serve what `fault` says: the reason for a restart, or None."""

    @app.get(PATH, include_in_schema=False)
    async def engine_health() -> PlainTextResponse:
        reason = fault()
        return PlainTextResponse(reason or "ok", 200 if reason is None else 503)
