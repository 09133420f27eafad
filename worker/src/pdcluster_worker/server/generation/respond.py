"""Check a request against the served model and the policy, log it once, and answer it."""

import logging
from hashlib import sha256

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.text import quoted
from pdcluster_worker.errors import RequestError
from pdcluster_worker.routing.qos.load_shedding import PriorityError, priority_of
from pdcluster_worker.routing.qos.tenants import tenant_policy
from pdcluster_worker.server.generation.chat_answer import PLAIN, AnswerRules
from pdcluster_worker.server.generation.choice import TextRules
from pdcluster_worker.server.generation.formatter import Formatter
from pdcluster_worker.server.generation.generation import (
    Generation,
    GenerationRequest,
    ServingContext,
)
from pdcluster_worker.server.generation.response import GenerationResponse
from pdcluster_worker.server.generation.sampling import SamplingRequest, specs_for
from pdcluster_worker.server.generation.structured import constraint_param
from pdcluster_worker.server.http.request_context import RequestContext
from pdcluster_worker.server.schemas.requests import CHAT_NAMES, Extension, Generate, Names
from pdcluster_worker.server.schemas.route_fields import check_route, hints_of

logger = logging.getLogger(__name__)

_SALT_DOMAIN = b"pdcluster prefix cache"


def check_servable(request: Generate, num_prompts: int, serving: ServingContext) -> None:
    """Raises RequestError: by the policy, 404 for another model, 503 while not ready; a draining
    worker knows its limits, and may have a peer.
    """
    backend = serving.backend
    check_model(request.model, backend.model_name)
    check_policy(request, num_prompts, serving.policy())
    reason = backend.ready()
    if reason is not None and not backend.draining():
        raise RequestError(
            f"this worker is not ready: {reason}",
            status=503,
            code="not_ready",
            retry_after_seconds=1,
        )


def check_policy(request: Generate, num_prompts: int, policy: PolicyConfig) -> None:
    if (
        request.pdcluster
        and request.pdcluster.deadline_ms
        and not policy.estimation.allow_client_deadline
    ):
        raise RequestError(
            "pdcluster.deadline_ms: is not allowed here: leave it out, or set "
            "qos.estimation.allowClientDeadline of the PDCluster",
            param="pdcluster.deadline_ms",
        )
    if request.pdcluster:
        check_route(request.pdcluster.route, policy.decode_score)
    limit, n = policy.admission.max_queued_requests, request.n or 1
    if num_prompts * n > limit:
        param = "prompt" if num_prompts > 1 else "n"
        raise RequestError(
            f"{param}: {num_prompts} prompts with n={n} are {num_prompts * n} generations, "
            f"more than the {limit} that may wait here (qos.admission.maxQueuedRequests): "
            "send fewer prompts, or a smaller n",
            param=param,
        )


def allowed_priority(request: Generate, policy: PolicyConfig, tenant: str) -> int:
    """The priority of a tenant's request.  Raises RequestError for one that it may not have."""
    ceiling = tenant_policy(policy, tenant).priority
    try:
        return priority_of(request.priority, ceiling, client_decides=policy.allow_client_priority)
    except PriorityError as e:
        raise RequestError(str(e), param="priority") from e


def check_tenant(num_prompts: int, n: int, policy: PolicyConfig, tenant: str) -> None:
    """Raises RequestError for more generations than the API key may ever have open at once."""
    limit = tenant_policy(policy, tenant).max_concurrent_requests
    if limit is None or num_prompts * n <= limit:
        return
    param = "prompt" if num_prompts > 1 else "n"
    raise RequestError(
        f"{param}: {num_prompts} prompts with n={n} are {num_prompts * n} generations, "
        f"more than the {limit} that may be open of this API key (maxConcurrentRequests): "
        "send fewer prompts, or a smaller n",
        param=param,
    )


def cache_salt(key_digest: bytes, own: str | None, *, shared: bool) -> bytes:
    """The salt of a request's prefix cache, which is shared within one salt only: 32 bytes, or b"".

    By default each API key has a salt of its own, so neither `cached_tokens` nor the time to the
    first token shows one client what another has sent.

    key_digest: SHA-256 of the presented API key, b"" where no key is asked for.
    own:        the request's field `cache_salt`.
    shared:     one cache for all keys; `own` separates even then.

    >>> cache_salt(b"", None, shared=False)
    b''
    >>> cache_salt(b"k" * 32, None, shared=True)
    b''
    >>> alice, bob = (cache_salt(key * 32, None, shared=False) for key in (b"a", b"b"))
    >>> len(alice), alice == bob
    (32, False)
    """
    digest = b"" if shared else key_digest
    if not digest and own is None:
        return b""
    parts = (_SALT_DOMAIN, digest, b"" if own is None else sha256(own.encode()).digest())
    return sha256(b"".join(len(part).to_bytes(1) + part for part in parts)).digest()


def check_model(name: str, served: str) -> None:
    """Raises RequestError 404 for a model that this worker does not serve."""
    if name != served:
        raise RequestError(
            f"model {quoted(name)} is not served here: use {served!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


def respond(
    serving: ServingContext,
    request: Generate,
    sampling_request: SamplingRequest,
    prompts: list[list[int]],
    formatter: Formatter,
    *,
    response_id: str,
    context: RequestContext,
    rules: AnswerRules = PLAIN,
    names: Names = CHAT_NAMES,
) -> GenerationResponse:
    """The answer, which runs when it is sent.  names: of the client's API."""
    policy = serving.policy()
    priority = allowed_priority(request, policy, context.tenant)
    check_tenant(len(prompts), request.n or 1, policy, context.tenant)
    shared = policy.shared_prefix_cache
    salt = cache_salt(context.key_digest, request.cache_salt, shared=shared)
    specs = specs_for(
        request,
        sampling_request,
        prompts,
        serving.limits,
        response_id=response_id,
        priority=priority,
        cache_salt=salt,
        tenant=context.tenant,
        prefiller=context.prefiller,
    )
    num_tokens = sum(len(prompt) for prompt in prompts)
    logger.info(
        "accepted request=%s label=%r prompts=%d prompt_tokens=%d n=%d",
        response_id,
        context.label,
        len(prompts),
        num_tokens,
        request.n or 1,
    )
    text_rules = TextRules(
        stop=tuple(request.stop or ()) if rules.keeps_stops else (),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
        shows_tokens=bool(request.return_token_ids) or sampling_request.prompt_logprobs is not None,
        ends_by_calls=rules.ends_by_calls,
    )
    extension = request.pdcluster or Extension()
    hints = hints_of(extension.session, extension.route, policy.decode_score)
    arrival, tenant = context.arrival_seconds, context.tenant
    constraint = rules.constraint_param or constraint_param(request)
    param = None if constraint is None else names.of(constraint)
    plan = GenerationRequest(
        specs, extension.prefill, hints, text_rules, arrival, tenant, rules.new_parser, param
    )
    return GenerationResponse(
        Generation(serving, plan), formatter, context.request_id, stream=bool(request.stream)
    )
