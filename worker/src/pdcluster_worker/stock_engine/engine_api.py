"""A stock engine's HTTP API, as requests are made and answers read: an adapter for each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdcluster_schema.stock_versions import unknown_version
from pdcluster_worker.messages.requests import CONSTRAINT_PARAM, RequestSpec
from pdcluster_worker.stock_engine import generate_api
from pdcluster_worker.stock_engine.metrics_page import Scrape, read_ranks
from pdcluster_worker.stock_engine.responses import (
    ChunkBody,
    WholeBody,
    decode_chunk,
    decode_whole,
)


class Request(Protocol):
    """Body of a request for a prompt, or for an answer as a stream."""

    def __call__(self, spec: RequestSpec, model: str, *, attempt: int) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineApi:
    """kind: of `engine.type`.  unknown_version: fault of a version; empty for a known one.
    refusal: (message, parameter) of what the engine cannot run; None = it can.
    longest: tokens that a prompt and its answer may have, of the context's length.
    """

    kind: str
    name: str
    unknown_version: Callable[[str], str]
    generate_path: str
    version_path: str
    numbers_path: str
    refusal: Callable[[RequestSpec], tuple[str, str] | None]
    generate: Request
    prompt_only: Request
    decode_chunk: Callable[[bytes], ChunkBody]
    decode_whole: Callable[[bytes], WholeBody]
    read_numbers: Callable[[bytes, int], list[Scrape]]  # of so many ranks
    longest: Callable[[int, Scrape], int]


def restarted_form(kind: str, spec: RequestSpec) -> tuple[str, str] | None:
    """Refuse a structured answer that has begun elsewhere."""
    if spec.sampling.constraint is None or not spec.output:
        return None
    message = (
        "a structured answer that has begun cannot go on at another worker with engine type "
        f"{kind}, which follows a grammar from an answer's first token: send the request again"
    )
    return message, CONSTRAINT_PARAM


# What differs between versions' /metrics the page itself tells (`Scrape.has_fetch_stages`)
VLLM_API = EngineApi(
    kind="vllm",
    name="vLLM",
    unknown_version=unknown_version,
    generate_path=generate_api.PATH,
    version_path="/version",
    numbers_path="/metrics",
    refusal=lambda spec: restarted_form("vllm", spec),
    generate=generate_api.generate,
    prompt_only=generate_api.prompt_only,
    decode_chunk=decode_chunk,
    decode_whole=decode_whole,
    read_numbers=read_ranks,
    longest=lambda length, _: length,
)
