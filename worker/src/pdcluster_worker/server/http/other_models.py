"""Models of other clusters behind this address: which requests are handed on to them."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx2
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.text import quoted, shortened
from pdcluster_worker.errors import RequestError, field_error
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.attempts import HedgeBudget
from pdcluster_worker.routing.qos.load_shedding import PriorityError, priority_of, tier_of
from pdcluster_worker.routing.qos.tenants import tenant_policy
from pdcluster_worker.server.errors import reason
from pdcluster_worker.server.http.disconnect import unless_disconnected
from pdcluster_worker.server.http.handed_on import GET_SECONDS, HandedOn
from pdcluster_worker.server.http.json_body import off_loop, parsed
from pdcluster_worker.server.http.mute_clusters import MuteClusters
from pdcluster_worker.server.http.open_answers import OpenAnswers
from pdcluster_worker.server.http.race import Race
from pdcluster_worker.server.http.request_context import context_in
from pdcluster_worker.tracing.request_trace import add_event

_OF_LOAD = frozenset(
    {
        *("slo_ttft", "slo_tpot", "prompt_limit", "waited_too_long", "displaced", "queue_full"),
        *("deadline_unmeetable", "no_decode_worker"),
    }
)
"""Codes of refusals in place of which a smaller model may answer."""

_GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/messages")
_ENTRANTS = ("first", "rival")
_OF_ONE_TOKENIZER = ("logit_bias", "stop_token_ids")
_TIMES = frozenset({"deadline_ms", "ttft_slo_ms"})
"""Fields of the extension that count from the request's arrival."""


class _Named(msgspec.Struct):
    """The only field of a body that is looked at before it is checked."""

    model: str | None = None


class _ModelLength(msgspec.Struct):
    max_model_len: int | None = None


_named = msgspec.json.Decoder(_Named).decode
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_length_of = msgspec.json.Decoder(_ModelLength).decode


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request with its whole body, and the way back to its client."""

    body: bytes
    scope: Scope
    receive: Receive
    send: Send


class OtherModels:
    """policy: in force now, with the address of each model."""

    def __init__(
        self, policy: Callable[[], PolicyConfig], metrics: Metrics, open_answers: OpenAnswers
    ) -> None:
        self._policy = policy
        self._metrics = metrics
        self._open_answers = open_answers
        self._budget = HedgeBudget()
        self._mute = MuteClusters()

    @property
    def addresses(self) -> Mapping[str, str]:
        return self._policy().models

    async def named(self, request: OpenRequest) -> str | None:
        """The model that another cluster serves, of a request that none has handed on before."""
        if not self.addresses or context_in(request.scope).requested_model:
            return None
        try:
            name = await off_loop(len(request.body), _model_of, request.body)
        except (ValueError, RecursionError, RequestError):
            return None  # what is wrong with it is said where it is checked
        return name if isinstance(name, str) and name in self.addresses else None

    async def answer(self, name: str, request: OpenRequest) -> None:
        """Raises RequestError where its cluster cannot be reached."""
        call = self._call(name, request.scope, request.body).marked(name)
        await unless_disconnected(request.receive, self._hand_on(call, request))

    async def run(self, own: ASGIApp, checked: Any, request: OpenRequest) -> None:
        """Have the own model answer, or it and the one that the request races on: the first wins.

        Raises RequestError where none answers, and for a race that is not allowed.
        """
        name = self._raced(checked, request.scope)
        if name is None:
            await own(request.scope, request.receive, request.send)
            return
        body = await off_loop(len(request.body), _renamed, request.body, name)
        call = self._call(name, request.scope, body).marked(checked.model)

        async def run_own(send: Send) -> None:
            await own(request.scope, _never, send)

        async def run_other(send: Send) -> None:
            await self._hand_on(call, replace(request, send=send), lambda status: status < 400)

        race = Race(request.send)
        add_event("race", first=checked.model, rival=name)
        try:
            await unless_disconnected(request.receive, race.run(run_own, run_other))
        finally:
            winner = "none" if race.winner is None else _ENTRANTS[race.winner]
            self._metrics.races.labels(winner).inc()
            add_event("race_won", by=winner)
            _note_losers(race)

    def _raced(self, checked: Any, scope: Scope) -> str | None:
        """The other model that a request races on.  Raises RequestError."""
        extension: Any = getattr(checked, "pdcluster", None)
        if extension is None or extension.race is None:
            return None
        name: str = extension.race
        policy = self._policy()
        if not policy.racing.models or name not in policy.models:
            raise field_error(
                "pdcluster.race",
                f"{quoted(name)} is no model to race on here: leave it out, or set "
                "routing.racing.models and service.models of the PDCluster",
            )
        if scope["path"] not in _GENERATING or _has_tokens(checked) or extension.route:
            raise field_error(
                "pdcluster.race",
                "is for chat, completions and messages without token ids or pdcluster.route: leave "
                "one of them out",
            )
        if context_in(scope).requested_model or not self._budget.earn(policy.racing):
            return None
        self._budget.spend()
        return name

    async def answer_instead(
        self, refusal: RequestError, checked: Any, request: OpenRequest
    ) -> bool:
        """Have the smaller model answer in place of a refusal; False = it does not.

        checked: the body, as the route takes it
        """
        name, passed = self._smaller(refusal, checked, request.scope), _passed_ms(request.scope)
        if name is None or not _has_time(checked, passed):
            return False
        body = await off_loop(
            len(request.body), _renamed, request.body, name, priority="low", passed_ms=passed
        )
        call = self._call(name, request.scope, body).marked(checked.model)
        has_answered = False

        async def hand_on() -> None:
            nonlocal has_answered
            has_answered = await self._hand_on(call, request, lambda status: status < 400)

        add_event("degraded", what=f"model={name}")
        try:
            await unless_disconnected(request.receive, hand_on())
        except RequestError:
            return False  # the client gets the refusal of its own model
        if has_answered:
            self._metrics.qos_degraded.labels("model", "low").inc()
        return has_answered

    def _smaller(self, refusal: RequestError, checked: Any, scope: Scope) -> str | None:
        policy, context = self._policy(), context_in(scope)
        smaller = policy.degradation.smaller_model
        if smaller is None or smaller.name not in policy.models or context.requested_model:
            return None
        if refusal.code not in _OF_LOAD or scope["path"] not in _GENERATING:
            return None
        extension = checked.pdcluster
        if extension is not None and (extension.smaller_model is False or extension.route):
            return None
        if extension is not None and extension.race == smaller.name:
            return None  # it was asked already
        ceiling = tenant_policy(policy, context.tenant).priority
        try:
            priority = priority_of(
                checked.priority, ceiling, client_decides=policy.allow_client_priority
            )
        except PriorityError:
            return None
        is_low = tier_of(priority) == "low"
        return smaller.name if is_low and not _has_tokens(checked) else None

    async def _hand_on(
        self,
        call: HandedOn,
        request: OpenRequest,
        takes: Callable[[int], bool] = lambda status: True,
    ) -> bool:
        outcome = "unavailable"
        try:
            async with self._mute.noted(call):
                is_taken = await call.answer(
                    *(request.scope, request.send, self._open_answers.interruptible, takes)
                )
            outcome = "answered" if is_taken else "refused"
            return is_taken
        except asyncio.CancelledError:
            outcome = "client_gone"
            raise
        finally:
            self._metrics.handed_on_requests.labels(call.name, outcome).inc()

    def _call(self, name: str, scope: Scope, body: bytes = b"") -> HandedOn:
        return HandedOn.of(scope, name, self._policy(), body)

    async def lengths(self, scope: Scope, only: str | None = None) -> dict[str, int | None]:
        """max_model_len by model, None where its cluster does not say it; without those that their
        clusters do not serve.  only: this model; None = all.
        """
        is_done = bool(context_in(scope).requested_model)
        names = [] if is_done else [each for each in self.addresses if only in (None, each)]
        calls = [self._call(name, scope) for name in names]
        cards = await asyncio.gather(*map(self._find, calls))
        found = zip(names, cards, strict=True)
        return {name: card.max_model_len for name, card in found if card is not None}

    async def _find(self, call: HandedOn) -> _ModelLength | None:
        """None where its cluster does not serve it."""
        call = replace(call.marked(call.name), path=f"/v1/models/{call.name}")
        if not call.address:
            return _ModelLength()
        try:
            async with asyncio.timeout(GET_SECONDS), call.open("GET") as response:
                body = await response.aread()
            return None if response.status_code == 404 else _length_of(body)
        except (TimeoutError, httpx2.TransportError, msgspec.DecodeError, UnicodeDecodeError):
            return _ModelLength()


def _note_losers(race: Race) -> None:
    """In the trace, how each one has ended that did not win."""
    for index, end in enumerate(race.ends):
        if index == race.winner:
            continue
        why, message = "refused", ""
        if isinstance(end, RequestError):
            why, message = reason(end), shortened(end.message, 200)
        elif isinstance(end, asyncio.CancelledError):
            why = "disconnected" if race.winner is None else "lost"
        elif end is not None:
            why = type(end).__name__
        add_event("race_lost", by=_ENTRANTS[index], reason=why, message=message)


def _model_of(body: bytes) -> Any:
    """Raises as `parsed`."""
    try:
        return _named(body).model
    except (ValueError, RecursionError):
        fields = parsed(body)  # it takes more, as NaN and UTF-16
        return fields.get("model") if isinstance(fields, dict) else None


def _renamed(
    body: bytes, model: str, *, priority: str | None = None, passed_ms: float = 0
) -> bytes:
    """The body of a request, which has been checked, for another model; without a race.

    passed_ms: of its times; priority: None = as it is.
    """
    fields, encoded = _opened(body)
    fields["model"] = model
    if priority is not None:
        fields["priority"] = priority
    own = fields.get("pdcluster")
    own = msgspec.json.decode(own) if isinstance(own, msgspec.Raw) else own
    if isinstance(own, dict):
        kept = {name: value for name, value in own.items() if name != "race"}
        for name in _TIMES & kept.keys():
            kept[name] = None if kept[name] is None else kept[name] - passed_ms
        fields["pdcluster"] = kept
    return encoded(fields)


def _opened(body: bytes) -> tuple[dict[str, Any], Callable[[Any], bytes]]:
    """The fields of a body, as they came where msgspec reads it, and what encodes them."""
    try:
        return _fields_of(body), msgspec.json.encode
    except (msgspec.DecodeError, UnicodeDecodeError):  # half a surrogate pair
        return json.loads(body), lambda fields: json.dumps(fields).encode()


def _passed_ms(scope: Scope) -> float:
    return 1000 * (time.monotonic() - context_in(scope).arrival_seconds)


def _has_time(checked: Any, passed_ms: float) -> bool:
    """False where a time of the request has passed."""
    times = (getattr(checked.pdcluster, name, None) for name in _TIMES)
    return all(each is None or each > passed_ms for each in times)


async def _never() -> Message:
    """Nothing comes of a client that another one waits for."""
    await asyncio.Event().wait()
    raise AssertionError("it is cancelled")


def _has_tokens(checked: Any) -> bool:
    """True if a request holds token ids, which mean other text to another model."""
    prompts = getattr(checked, "prompt", None)
    has_ids = isinstance(prompts, list) and not all(isinstance(each, str) for each in prompts)
    return has_ids or any(getattr(checked, name, None) for name in _OF_ONE_TOKENIZER)
