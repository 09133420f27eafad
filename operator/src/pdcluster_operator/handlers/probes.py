"""Probes and metrics over HTTP: /healthz (liveness), /readyz (able to take over), /metrics."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

# Function that returns the problems, a sentence each; empty = none
Problems = Callable[[], list[str]]


def make_app(
    unhealthy: Problems, unready: Problems, registry: CollectorRegistry
) -> web.Application:
    async def healthz(request: web.Request) -> web.Response:
        return _answer(unhealthy())

    async def readyz(request: web.Request) -> web.Response:
        return _answer(unready())

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    app = web.Application()
    app.add_routes(
        [web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)]
    )
    return app


async def serve(app: web.Application, port: int) -> tuple[web.AppRunner, int]:
    """Listen on all addresses, of both families; returns the runner, to be cleaned up, and the
    port.  With port 0 each family gets one of its own, and that of IPv4 is returned. Raises OSError
    when the port is taken.
    """
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner, int(min(runner.addresses, key=len)[1])  # an address of IPv6 has four parts


def _answer(problems: list[str]) -> web.Response:
    return web.Response(status=503 if problems else 200, text="\n".join(problems or ["ok"]) + "\n")
