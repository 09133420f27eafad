"""Check a request against the served model and the policy, log it once, and answer it."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from hashlib import sha256

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.text import quoted
from pdcluster_worker.errors import RequestError, field_error
from pdcluster_worker.routing.qos.load_shedding import PriorityError, priority_of, tier_of
from pdcluster_worker.routing.qos.tenants import tenant_policy
from pdcluster_worker.server.errors import reason
from pdcluster_worker.server.generation.ending import CANCELLED, RequestNames, note_end
from pdcluster_worker.server.generation.formatter import MEDIA_TYPE, Formatter
from pdcluster_worker.server.generation.front_end import Prepared
from pdcluster_worker.server.generation.generation import (
    Generation,
    GenerationRequest,
    ServingContext,
    WorkerView,
)
from pdcluster_worker.server.generation.sampling import specs_for
from pdcluster_worker.server.http.disconnect import unless_disconnected
from pdcluster_worker.server.http.open_answers import OpenAnswers
from pdcluster_worker.server.http.other_models import OtherModels
from pdcluster_worker.server.http.raw_http import DIRECT_WRITER
from pdcluster_worker.server.http.request_context import RequestContext, header_of
from pdcluster_worker.server.schemas.requests import (
    CHAT_NAMES,
    CompletionRequest,
    Extension,
    Generate,
    Names,
    check_route,
    hints_of,
)
from pdcluster_worker.server.text.events import Delta
from pdcluster_worker.streams import Mapped, Reader

logger = logging.getLogger(__name__)

PREFILL_HEADER = "x-pdcluster-prefill"
DEGRADED_HEADER = "x-pdcluster-degraded"


class GenerationResponse(Response):
    def __init__(
        self,
        generation: Generation,
        formatter: Formatter,
        names: RequestNames,
        open_answers: OpenAnswers,
        *,
        stream: bool,
    ) -> None:
        super().__init__()
        self._generation = generation
        self._open_answers = open_answers
        self._formatter = formatter
        self._streams = stream
        self._names = names
        self._failure: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct_writer: Reader[bytes] | None = scope.get("state", {}).get(DIRECT_WRITER)
        answer = (
            self._stream(send, direct_writer)
            if self._streams
            else self._whole(scope, receive, send)
        )
        try:
            if not await unless_disconnected(receive, answer):
                self._failure = "disconnected"
        except asyncio.CancelledError:
            self._failure = CANCELLED
            raise
        except Exception as e:
            self._failure = reason(e) if isinstance(e, RequestError) else "internal_error"
            raise
        finally:
            note_end(self._generation, self._names, self._failure)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        choices: list[list[Delta]] = [[] for _ in range(self._generation.num_choices)]
        async with aclosing(self._generation.deltas()) as deltas:
            first = await self._first(deltas)
            choices[first.index].append(first)
            try:
                with self._open_answers.interruptible():
                    async for delta in deltas:
                        choices[delta.index].append(delta)
            except RequestError as e:
                self._failure = reason(e)
                await self._formatter.refused(e)(scope, receive, send)
                return
        body = self._formatter.whole(choices, self._generation.usage())
        await Response(body, headers=self._answer_headers("application/json"))(scope, receive, send)

    async def _first(self, deltas: AsyncGenerator[Delta, None]) -> Delta:
        """Raises RequestError where the request is refused."""
        with self._open_answers.interruptible():
            return await anext(deltas)

    async def _stream(self, send: Send, direct_writer: Reader[bytes] | None) -> None:
        formatter = self._formatter
        async with aclosing(self._generation.deltas()) as deltas:
            first = await self._first(deltas)
            headers = Response(
                headers={**self._answer_headers(MEDIA_TYPE), "cache-control": "no-cache"}
            ).raw_headers
            await send(
                {
                    "type": "http.response.start",
                    "status": 200,
                    "headers": [h for h in headers if h[0] != b"content-length"],
                }
            )
            try:
                await _send(send, formatter.begin(self._generation.usage()))
                await _send(send, formatter.of(first))
                if direct_writer is not None:
                    # an empty part would be the body's end
                    events: Mapped[Delta, bytes]
                    events = Mapped(lambda delta: formatter.of(delta) or None, direct_writer)
                    self._generation.follow(events)
                with self._open_answers.interruptible():
                    async for delta in deltas:
                        await _send(send, formatter.of(delta))
                end = formatter.end(self._generation.usage())
            except Exception as e:
                shown = self._shown(e)
                self._failure = reason(shown)
                end = formatter.failed(shown)
        await send({"type": "http.response.body", "body": end, "more_body": False})

    def _shown(self, error: Exception) -> RequestError:
        if isinstance(error, RequestError):
            logger.warning(
                "failed after the first token request=%s error=%s", self._names.request, error
            )
            return error
        logger.error("unhandled error request=%s", self._names.request, exc_info=error)
        return RequestError(
            f"internal error: see the worker's log for request {self._names.request}",
            status=500,
            code="internal_error",
        )

    def _answer_headers(self, media_type: str) -> dict[str, str]:
        place, degraded = self._generation.prefill, self._generation.degraded
        headers = {PREFILL_HEADER: place or "", DEGRADED_HEADER: header_of(", ".join(degraded))}
        return {"content-type": media_type} | {
            name: value for name, value in headers.items() if value
        }


async def _send(send: Send, body: bytes | None) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


_SALT_DOMAIN = b"pdcluster prefix cache"


def check_servable(request: Generate, num_prompts: int, serving: ServingContext) -> None:
    """Raises RequestError: by the policy, 404 for another model, 503 while not ready."""
    backend = serving.backend
    check_model(request.model, backend, serving.others)
    _check_policy(request, num_prompts, serving.policy())
    reason = backend.ready()
    if reason is not None and not backend.draining():
        raise not_ready(reason)


def check_model(name: str, worker: WorkerView, others: OtherModels | None) -> None:
    """Raises RequestError 404 for a model that this cluster does not serve."""
    if name not in (worker.model_name, *worker.adapters):
        listed = " or one of its adapters, which /v1/models lists" if worker.adapters else ""
        if others is not None and others.addresses:
            listed = " or another one that /v1/models lists"
        raise RequestError(
            f"model {quoted(name)} is not served here: use {worker.model_name!r}{listed}",
            status=404,
            param="model",
            code="model_not_found",
        )


def not_ready(reason: str) -> RequestError:
    return RequestError(
        f"this worker is not ready: {reason}", status=503, code="not_ready", retry_after_seconds=1
    )


def _check_policy(request: Generate, num_prompts: int, policy: PolicyConfig) -> None:
    extension = request.pdcluster or Extension()
    if extension.deadline_ms and not policy.estimation.allow_client_deadline:
        raise field_error(
            "pdcluster.deadline_ms",
            "is not allowed here: leave it out, or set "
            "qos.estimation.allowClientDeadline of the PDCluster",
        )
    check_route(extension.route, policy.decode_score)
    limit = policy.admission.max_queued_requests
    _check_count(request, num_prompts, limit, "wait here (qos.admission.maxQueuedRequests)")


def _check_count(request: Generate, num_prompts: int, limit: int | None, what: str) -> None:
    n = request.n or 1
    if limit is None or num_prompts * n <= limit:
        return
    param = "prompt" if num_prompts > 1 else "n"
    raise field_error(
        param,
        f"{num_prompts} prompts with n={n} are {num_prompts * n} generations, more than "
        f"the {limit} that may {what}: send fewer prompts, or a smaller n",
    )


def _allowed_priority(request: Generate, policy: PolicyConfig, context: RequestContext) -> int:
    """The priority of a tenant's request.  Raises RequestError for one that it may not have.

    One that was handed on may have a low one: it has lost what another cluster takes from those.
    """
    ceiling, requested = tenant_policy(policy, context.tenant).priority, request.priority
    is_lower = (
        bool(context.requested_model) and requested is not None and tier_of(requested) == "low"
    )
    client_decides = policy.allow_client_priority or is_lower
    try:
        return priority_of(requested, ceiling, client_decides=client_decides)
    except PriorityError as e:
        raise RequestError(str(e), param="priority") from e


def cache_salt(
    key_digest: bytes, own: str | None, *, shared: bool, adapter: str = "", weights: str = ""
) -> bytes:
    """The salt of a request's prefix cache, which is shared within one salt only: 32 bytes, or b"".

    By default each API key has a salt of its own, so neither `cached_tokens` nor the time to the
    first token shows one client what another has sent.

    key_digest: SHA-256 of the presented API key, b"" where no key is asked for.
    own:        the request's field `cache_salt`.
    shared:     one cache for all keys; `own` separates even then.
    adapter:    of which the KV is; another one computes another KV of the same tokens.
    weights:    their fingerprint, where the adapter was loaded while the engine runs.

    >>> cache_salt(b"", None, shared=False), cache_salt(b"k" * 32, None, shared=True)
    (b'', b'')
    >>> alice, bob = (cache_salt(key * 32, None, shared=False) for key in (b"a", b"b"))
    >>> len(alice), alice == bob
    (32, False)
    """
    digest = b"" if shared else key_digest
    if not digest and own is None and not adapter:
        return b""
    parts = [_SALT_DOMAIN, digest, b"" if own is None else sha256(own.encode()).digest()]
    if adapter:
        parts.append(sha256(adapter.encode()).digest())
    if weights:
        parts.append(sha256(weights.encode()).digest())
    return sha256(b"".join(len(part).to_bytes(1) + part for part in parts)).digest()


def _lost_model(model: str, requested: str) -> tuple[str, ...]:
    """requested: by the client; "" = `model`."""
    return (f"model={model}",) if requested not in ("", model) else ()


def respond(
    serving: ServingContext,
    request: Generate,
    prepared: Prepared,
    formatter: Formatter,
    *,
    response_id: str,
    context: RequestContext,
    names: Names = CHAT_NAMES,
) -> GenerationResponse:
    """The answer, which runs when it is sent.  names: of the client's API."""
    policy, tenant, prompts = serving.policy(), context.tenant, prepared.prompts
    priority = _allowed_priority(request, policy, context)
    limit = tenant_policy(policy, tenant).max_concurrent_requests
    _check_count(request, len(prompts), limit, "be open of this API key (maxConcurrentRequests)")
    shared = policy.shared_prefix_cache
    adapter = "" if request.model == serving.backend.model_name else request.model
    if adapter:  # it may have gone since
        check_model(adapter, serving.backend, serving.others)
    weights = serving.backend.adapters.get(adapter, "")
    specs = specs_for(
        request,
        prepared.sampling_request,
        prompts,
        serving.limits,
        response_id=response_id,
        priority=priority,
        cache_salt=cache_salt(
            *(context.key_digest, request.cache_salt),
            shared=shared,
            adapter=adapter,
            weights=weights,
        ),
        adapter=adapter,
        adapter_weights=weights,
        tenant=tenant,
        prefiller=context.prefiller,
        images=prepared.images,
    )
    logger.info(
        "accepted request=%s label=%r prompts=%d prompt_tokens=%d n=%d",
        *(response_id, context.label, len(prompts), sum(map(len, prompts)), request.n or 1),
    )
    extension, rules = request.pdcluster or Extension(), prepared.rules
    if rules.constraint_param is not None:
        rules = replace(rules, constraint_param=names.of(rules.constraint_param))
    hints = hints_of(extension.session, extension.route, policy.decode_score)
    streams = bool(request.stream)
    plan = GenerationRequest(
        *(specs, extension.prefill, hints, rules, context.arrival_seconds, tenant),
        derender=prepared.derender,
        streams=streams,
        lost=_lost_model(request.model, context.requested_model),
    )
    operation = "text_completion" if isinstance(request, CompletionRequest) else "chat"
    ended = RequestNames(context.request_id, response_id, context.label, operation)
    generation = Generation(serving, plan)
    return GenerationResponse(generation, formatter, ended, serving.open_answers, stream=streams)
