"""`pdctl chat`: a conversation in the terminal with a cluster that runs here, or at a URL."""

import asyncio
import json
import readline  # noqa: F401 - lines of input() can be edited, and come back
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import aiohttp
import typer

from pdcluster_api.errors import IncompleteAnswerError, StartError, no_answer
from pdctl.bench.openai import completion_event, first_model, server_sent_events
from pdctl.cli.chat_answer import ChatAnswer, plain
from pdctl.cli.completion import Cluster
from pdctl.cli.options import STDIN, StateDir, read_text, reported
from pdctl.cli.status import find_directory
from pdctl.local.run_directory import RunDirectory, default_state_dir, read_api_key
from pdctl.local.up import check_key

_CONNECT_SECONDS = 10.0
_PREFILL_HEADER, _ROUTE_HEADER = "x-pdcluster-prefill", "x-pdcluster-route"

Message = dict[str, str]


@dataclass(frozen=True)
class ChatTarget:
    """base_url: without /v1.  None = the first model that the server names; the server's own
    temperature.
    """

    base_url: str
    model: str | None
    api_key: str | None
    temperature: float | None = None
    max_tokens: int | None = None

    @property
    def headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {_ROUTE_HEADER: "1", **key}


async def ask(target: ChatTarget, messages: list[Message], answer: ChatAnswer) -> None:
    """Print the answer as it comes.  Raises StartError where it does not, or not to its end."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
    try:
        async with aiohttp.ClientSession(headers=target.headers, timeout=timeout) as session:
            model = target.model or await first_model(session, target.base_url, _check, "--url")
            body: dict[str, Any] = {
                "model": model,
                "messages": messages,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            if target.max_tokens is not None:
                body["max_tokens"] = target.max_tokens
            if target.temperature is not None:
                body["temperature"] = target.temperature
            url, answer.began = f"{target.base_url}/v1/chat/completions", time.monotonic()
            async with session.post(url, json=body) as response:
                await _check(response)
                answer.prefill = plain(response.headers.get(_PREFILL_HEADER, ""))
                answer.route = plain(response.headers.get(_ROUTE_HEADER, ""))
                is_whole = False
                async for data in server_sent_events(response.content):
                    if data == b"[DONE]":
                        is_whole = True
                    else:
                        answer.take(completion_event(data))
    except IncompleteAnswerError as e:
        message = plain(f"the answer ended early: {e}")
        raise StartError(message, exit_code=1) from e
    except (LookupError, TypeError, AttributeError) as e:
        message = f"{target.base_url}: an event is not of OpenAI's API: {e!r}; correct --url"
        raise StartError(message, exit_code=1) from e
    except (aiohttp.ClientError, OSError) as e:
        begun = "the answer ended early" if answer.text else "nothing answers"
        message = f"{begun} at {target.base_url}: {no_answer(e)}; is the server running there?"
        raise StartError(message, exit_code=1) from e
    if not is_whole:
        raise StartError("the answer ended early: its stream has no end", exit_code=1)


async def _check(response: aiohttp.ClientResponse) -> None:
    """Raises StartError with the server's reason."""
    if response.status == 200:
        return
    try:
        reason = json.loads(await response.read())["error"]["message"]
    except (ValueError, LookupError, TypeError):
        reason = response.reason
    fix = "; give --api-key or PDCLUSTER_API_KEY" if response.status == 401 else ""
    message = plain(f"{response.url}: {response.status}: {reason}{fix}")
    raise StartError(message, exit_code=1)


def converse(target: ChatTarget) -> None:
    """Until the end of input, or a Ctrl-C between answers."""
    messages: list[Message] = []
    typer.secho(
        f"{target.model or target.base_url}: Ctrl-C ends an answer, then the chat; so does Ctrl-D",
        dim=True,
    )
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            typer.echo()
            return
        if prompt.strip():
            _turn(target, messages, prompt)


def _turn(target: ChatTarget, messages: list[Message], prompt: str) -> None:
    """One question and its answer, of which a part is kept; a question without one is not."""
    messages.append({"role": "user", "content": prompt})
    answer = ChatAnswer()
    try:
        asyncio.run(ask(target, messages, answer))
    except KeyboardInterrupt:
        typer.echo(" ...", nl=False)
    except StartError as e:
        typer.echo(f"error: {e}", err=True)
    typer.echo()
    if answer.text:
        messages.append({"role": "assistant", "content": answer.text})
        typer.secho(answer.figures(), dim=True)
    else:
        messages.pop()


def answer_once(target: ChatTarget, prompt: str) -> None:
    """Raises StartError where there is no whole answer."""
    answer = ChatAnswer()
    asyncio.run(ask(target, [{"role": "user", "content": prompt}], answer))
    typer.echo()
    typer.secho(answer.figures(), dim=True, err=True)


def chat_command(
    name: Cluster = None,
    *,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="of any server of OpenAI's API, in place of a cluster that runs here; for one in "
            "Kubernetes as `kubectl port-forward service/NAME` gives it",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="else the first that the server names")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="PDCLUSTER_API_KEY", metavar="KEY", help="of a server at a URL that asks for one"
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=2, help="0 = the likeliest token each time; else the server's own"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="where an answer is cut")
    ] = 512,
    state_dir: StateDir = None,
) -> None:
    """Chat with a cluster that runs on this machine. After each answer a line says how fast it
    came, where it was prefilled and why.

    Where stdin is no terminal, all of it is one prompt: the answer alone goes to stdout, and that
    line to stderr.
    """
    with reported():
        if url is not None and name is not None:
            raise StartError("give a NAME or --url, not both", exit_code=2)
        check_key(api_key)
        if url is None:
            target = _local(*find_directory(state_dir or default_state_dir(), name), model, api_key)
        elif not url.startswith(("http://", "https://")):
            reason = f"--url: must begin with http:// or https://, not {url!r}"
            raise StartError(f"{reason}; write http://HOST:PORT", exit_code=2)
        else:
            target = ChatTarget(url.rstrip("/").removesuffix("/v1"), model, api_key)
        target = replace(target, temperature=temperature, max_tokens=max_tokens)
        if sys.stdin.isatty():
            converse(target)
        elif prompt := read_text(STDIN).strip():
            answer_once(target, prompt)
        else:
            raise StartError("stdin is empty; write a prompt to it", exit_code=2)


def _local(
    run: RunDirectory, state: Mapping[str, Any], model: str | None, api_key: str | None
) -> ChatTarget:
    """The ingress of a run, with its own key.  Raises StartError where it is not there."""
    http = {worker["name"]: worker["http"] for worker in state["workers"]}[state["ingress"]]
    if http is None:
        message = f"{state['ingress']}, the ingress of {run.name}, is not ready; see pdctl status"
        raise StartError(message, exit_code=1)
    key = read_api_key(run) or api_key
    return ChatTarget(f"http://{http}", model or state["model"], key)
