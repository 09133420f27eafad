"""Requests of the chat and completions APIs, and how other APIs make chat requests."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, ValidationError

from pdcluster_schema.routing import DecodePolicy, DecodeScoreSpec
from pdcluster_worker.errors import RequestError, field_error
from pdcluster_worker.messages.peers import PrefillMode
from pdcluster_worker.routing.decode_choice import NO_HINTS, RouteHints
from pdcluster_worker.server.http.json_body import from_validation
from pdcluster_worker.server.schemas.chat_fields import Conversation
from pdcluster_worker.server.schemas.fields import (
    MAX_N,
    Body,
    CacheSalt,
    DeadlineMilliseconds,
    LogitBias,
    Only,
    Priority,
    PromptList,
    Session,
    SloMilliseconds,
    StopList,
    Text,
    TokenIds,
)
from pdcluster_worker.server.schemas.known_fields import KnownChatFields, KnownFields
from pdcluster_worker.server.schemas.structured import Structured

MAX_WEIGHT = 1e6

PodName = Annotated[str, Field(min_length=1, max_length=253)]
RouteWeight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]

_KV_AWARE = ("overlap_credit", "prefill_load_scale", "prefill_decay", "active_request_weight")


class RouteFields(Body, extra="forbid"):
    """`pdcluster.route`, for tests: a worker, a policy or weights for one request in place of the
    policy's.

    worker: the pod that must run it.  policy: by which the worker is chosen.
    temperature and the weights of kvAware: as in spec.routing.decodeScore; null = the policy's.
    """

    worker: PodName | None = None
    policy: DecodePolicy | None = None
    temperature: RouteWeight | None = None
    overlap_credit: RouteWeight | None = None
    prefill_load_scale: RouteWeight | None = None
    prefill_decay: RouteWeight | None = None
    active_request_weight: RouteWeight | None = None


def check_route(route: RouteFields | None, policy: DecodeScoreSpec) -> None:
    """Raises RequestError where the policy lets no request say how it is routed."""
    if route is not None and not policy.allow_request_overrides:
        raise field_error(
            "pdcluster.route",
            "is not allowed here: leave it out, or set "
            "routing.decodeScore.allowRequestOverrides of the PDCluster",
        )


def hints_of(session: str | None, route: RouteFields | None, policy: DecodeScoreSpec) -> RouteHints:
    if route is None:
        return RouteHints(session=session) if session else NO_HINTS
    given = route.model_dump(exclude={"worker"}, exclude_none=True)
    weights = {name: given.pop(name) for name in _KV_AWARE if name in given}
    score = None
    if given or weights:
        kv_aware = policy.kv_aware.model_copy(update=weights)
        score = policy.model_copy(update={"kv_aware": kv_aware, **given})
    return RouteHints(session or "", route.worker or "", score)


_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_FIELD_END = re.compile(r"[.\[]")

PositiveInt = Annotated[int, Field(ge=1, le=_INT32)]
Logprobs = Annotated[int, Field(ge=0, le=20)]


class StreamOptions(Body):
    """include_usage: one more chunk before [DONE], with the usage of the whole request.
    continuous_usage_stats: with it, every chunk has the usage so far; vLLM's and SGLang's.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Extension(Body):
    """Our own field, `pdcluster`.

    prefill: where the prompt is computed; auto leaves it to the policy.
    ttft_slo_ms, tpot_slo_ms: latency objectives of this request, in milliseconds; null = the
                              policy's.
    deadline_ms: until its last token, in milliseconds; requests that wait go by it. null =
                 whenever.
    session: requests of one session run on one worker, which has their prefix; null = none.
    route: how the worker is chosen, for tests, where the policy allows it.
    race: another model that answers too, where the policy allows it; the first one wins.
    smaller_model: false = a refusal, and no answer of qos.degradation.smallerModel in its place.
    """

    prefill: PrefillMode = "auto"
    ttft_slo_ms: SloMilliseconds | None = None
    tpot_slo_ms: SloMilliseconds | None = None
    deadline_ms: DeadlineMilliseconds | None = None
    session: Session | None = None
    route: RouteFields | None = None
    race: Text | None = None
    smaller_model: bool | None = None


class Sampling(Body):
    """Fields that all APIs share which generate."""

    stream: bool | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=_INT32)] = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    pdcluster: Extension | None = None


class Generate(Structured, Sampling, KnownFields):
    """Fields that the two APIs share."""

    model: Text
    max_tokens: PositiveInt | None = None
    n: Annotated[int | None, Field(ge=1, le=MAX_N)] = None
    stream_options: StreamOptions | None = None
    stop: StopList = None
    seed: Annotated[int | None, Field(ge=-_INT64 - 1, le=_INT64)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    logit_bias: LogitBias = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(ge=0.01, le=100)] = None
    min_tokens: Annotated[int | None, Field(ge=0, le=_INT32)] = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Logprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class ChatRequest(Generate, Conversation, KnownChatFields):
    """Body of POST /v1/chat/completions."""

    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    echo: Annotated[Any, Only(None, False, fix="/v1/completions has it")] = None
    documents: Annotated[Any, Only(None, [], fix="put them into a message")] = None
    chat_template: Annotated[Any, Only(None, fix="set model.chatTemplate of the PDCluster")] = None
    add_special_tokens: Annotated[Any, Only(None, False)] = None


class CompletionRequest(Generate):
    """Body of POST /v1/completions.

    best_of:    must equal n: every choice that is computed is returned.
    max_tokens: 0 asks for what is said of the prompt alone.
    """

    prompt: PromptList
    max_tokens: Annotated[int | None, Field(ge=0, le=_INT32)] = None
    logprobs: Logprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int | None, Field(ge=1, le=MAX_N)] = None
    suffix: Annotated[
        Any, Only(None, fix="write the prompt with the model's own tokens for it")
    ] = None
    prompt_embeds: Annotated[Any, Only(None, fix="send text or token ids")] = None
    add_special_tokens: Annotated[Any, Only(None, True)] = None


@dataclass(frozen=True, slots=True)
class Names:
    """Names that the client of an API knows for chat's fields.

    fields: of whole fields; the place within such a field is left out, for it is chat's.
    parts:  of parts of the paths within others; the first that is found counts.
    """

    fields: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)

    def of(self, param: str) -> str:
        """Translate the path of a field.

        >>> names = Names({"response_format": "text.format"}, {".function": ""})
        >>> names.of("response_format.json_schema.schema"), names.of("tools[0].function.name")
        ('text.format', 'tools[0].name')
        """
        name = self.fields.get(_FIELD_END.split(param, maxsplit=1)[0])
        if name is not None:
            return name
        part = next((part for part in self.parts if part in param), None)
        return param if part is None else param.replace(part, self.parts[part], 1)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Translate the field that a RequestError of the block names."""
        try:
            yield
        except RequestError as e:
            if e.param is not None:
                name = self.of(e.param)
                e.message, e.param = e.message.replace(e.param, name, 1), name
            raise


CHAT_NAMES = Names()
"""Names of chat itself."""


def function_of(**fields: Any) -> dict[str, Any]:
    """A tool, a choice or a call of one, as chat has it."""
    return {"type": "function", "function": fields}


def checked_chat(fields: dict[str, Any]) -> ChatRequest:
    """The request with these fields.  Raises RequestError in the words of chat."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as e:
        raise from_validation(e.errors(include_url=False), fields) from e
