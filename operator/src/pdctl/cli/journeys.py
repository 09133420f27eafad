"""`pdctl why --request`: asks the workers which of them knows a request, and what they noted of it.

Asked are one address, the workers of a cluster on this machine, or the pods of
one in Kubernetes, through its API server.  A worker that does not answer is
skipped, and named where none knows the request.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp

from pdcluster_api.apiserver.client import ApiClient
from pdcluster_api.apiserver.errors import ClusterError, NotFoundError
from pdcluster_api.apiserver.kinds import POD
from pdcluster_api.errors import StartError
from pdcluster_api.schema import labels
from pdctl.cli.live import Place, ask

HTTP_PORT = 8000
"""HTTP port of every worker in a pod (docs/contracts.md)."""

_SECONDS = 5.0

Journey = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """Answer of one worker: its journeys of the request, or the error why it has none."""

    worker: str
    journeys: tuple[Journey, ...] = ()
    problem: str | None = None


def of_addresses(addresses: Mapping[str, str], request_id: str, api_key: str | None) -> list[Found]:
    """Ask workers at base URLs, by name."""

    async def ask_all() -> list[Found]:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            asked = (_of_address(session, name, url, request_id) for name, url in addresses.items())
            return list(await asyncio.gather(*asked))

    return asyncio.run(ask_all())


async def _of_address(
    session: aiohttp.ClientSession, name: str, url: str, request_id: str
) -> Found:
    try:
        async with session.get(f"{url.rstrip('/')}{_path(request_id)}") as answer:
            body = await answer.json()
            if answer.status == 404:
                return Found(name)
            if answer.status != 200:
                return Found(name, problem=f"{answer.status}: {_message(body)}")
            return Found(name, _journeys(body))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
        return Found(name, problem=f"does not answer ({type(e).__name__}: {e})")


def of_cluster(place: Place, name: str, request_id: str) -> list[Found]:
    """Ask the worker pods of a cluster through the API server.

    Raises StartError when that cannot be asked.
    """
    namespace = place.in_namespace()

    async def ask_pods(client: ApiClient) -> list[Found]:
        selector = f"{labels.CLUSTER}={name},{labels.ROLE}"
        pods = [
            pod["metadata"]["name"] async for pod in client.list(POD, namespace, labels=selector)
        ]
        return list(
            await asyncio.gather(*(_of_pod(client, namespace, pod, request_id) for pod in pods))
        )

    return ask(place, ask_pods)


async def _of_pod(client: ApiClient, namespace: str, pod: str, request_id: str) -> Found:
    try:
        return Found(
            pod, _journeys(await client.proxied(namespace, pod, HTTP_PORT, _path(request_id)))
        )
    except NotFoundError:
        return Found(pod)
    except ClusterError as e:
        fix = (
            f"kubectl port-forward {pod} {HTTP_PORT}, then give --url http://127.0.0.1:{HTTP_PORT} "
            "and --api-key"
        )
        return Found(pod, problem=f"cannot be asked through the API server: {e}; {fix}")


def known(found: Sequence[Found], request_id: str) -> list[tuple[str, Journey]]:
    """(worker, journey) of those that know the request, where it came in first.

    Raises StartError (exit code 1) when none does.
    """
    journeys = [(each.worker, journey) for each in found for journey in each.journeys]
    if journeys:
        return sorted(
            journeys, key=lambda pair: (_role(pair[1]) != "ingress", pair[1].get("began_unix", 0.0))
        )
    problems = [f"{each.worker} {each.problem}" for each in found if each.problem is not None]
    if not found:
        raise StartError("no worker is there to ask", exit_code=1)
    message = (
        f"none of {len(found)} workers knows request {request_id}: each keeps its last 2048 that "
        "have ended"
    )
    raise StartError("\n".join([message, *problems]), exit_code=1)


def _role(journey: Journey) -> object:
    events = journey.get("events") or [{}]
    return events[0].get("facts", {}).get("role")


def _path(request_id: str) -> str:
    return f"/debug/requests/{quote(request_id, safe='')}"


def _journeys(body: Any) -> tuple[Journey, ...]:
    found = body.get("journeys") if isinstance(body, dict) else None
    return (
        tuple(each for each in found if isinstance(each, dict)) if isinstance(found, list) else ()
    )


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else "no reason given"
