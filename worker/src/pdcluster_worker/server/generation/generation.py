"""Runs all choices of one HTTP request on the backend and turns their tokens into deltas."""

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Protocol

from msgspec.structs import replace

from pdcluster_schema.policy import PolicyConfig
from pdcluster_schema.qos import Tier
from pdcluster_worker.errors import RequestError
from pdcluster_worker.messages.adapters import AdapterReply
from pdcluster_worker.messages.facts import DeviceFacts
from pdcluster_worker.messages.overview import ClusterOverview
from pdcluster_worker.messages.peers import Generated, PrefillMode, PrefillPlace
from pdcluster_worker.messages.requests import RequestSpec
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.decode_choice import NO_HINTS, RouteHints
from pdcluster_worker.routing.qos.load_shedding import TOO_MANY_REQUESTS, aged, slo_of, tier_of
from pdcluster_worker.routing.qos.tenants import Demand, Tenants, tenant_policy
from pdcluster_worker.server.generation.chat_answer import NO_PARSERS, ModelParsers
from pdcluster_worker.server.generation.choice import AnswerRules, Choice, ChoiceTimer
from pdcluster_worker.server.generation.derender import Derender, EngineChoice, Unread
from pdcluster_worker.server.generation.formatter import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from pdcluster_worker.server.generation.front_end import FrontEnd
from pdcluster_worker.server.generation.sampling import ModelLimits
from pdcluster_worker.server.http.open_answers import OpenAnswers
from pdcluster_worker.server.http.other_models import OtherModels
from pdcluster_worker.server.schemas.structured import with_field
from pdcluster_worker.server.text.events import Delta
from pdcluster_worker.server.text.tokenizer import Tokenizer
from pdcluster_worker.streams import Mapped, Merged, Reader, ReaderGate, Stream
from pdcluster_worker.tracing.request_trace import merge_events


class AdapterControl(Protocol):
    """Raises RequestError for what is refused."""

    async def load(self, name: str, path: str) -> AdapterReply: ...

    async def unload(self, name: str) -> AdapterReply:
        """Wait for its last request."""
        ...


class WorkerView(Protocol):
    """Until the engine is ready sizes are 0, others None.  length_note: why it is shorter."""

    model_name: str
    max_model_len: int
    vocab_size: int
    length_note: str
    device: DeviceFacts | None
    scheduler: str | None

    @property
    def adapters(self) -> Mapping[str, str]:
        """Names of LoRA adapters that requests may use, and fingerprints of those that were loaded
        while their engine runs.
        """
        ...

    def adapter_calls(self) -> AdapterControl:
        """Raises RequestError where none comes while the worker runs."""
        ...

    def ready(self) -> str | None:
        """None when requests may come, else why not, in words."""
        ...

    def alive(self) -> str | None:
        """None while the engine lives, else why it does not."""
        ...

    def shortfall(self) -> str | None:
        """Parts of a serving worker that do not serve, in words; None when all serve."""
        ...

    def draining(self) -> bool:
        """True if it takes nothing new and is about to end."""
        ...


class Backend(WorkerView, Protocol):
    def num_ingresses(self) -> int:
        """Workers over which the requests of clients are spread, this one included."""
        ...

    def overview(self) -> ClusterOverview:
        """The cluster as it is seen from here.  Raises RequestError 503 before it serves."""
        ...

    def generate(
        self,
        specs: list[RequestSpec],
        prefill: PrefillMode,
        hints: RouteHints = NO_HINTS,
        reader: Reader[Generated] | None = None,
    ) -> AsyncGenerator[Generated, None]:
        """All choices of one prompt, `Generated.index` counting in `specs`; `aclose()` cancels
        those that run. Raises RequestError before or after tokens.

        reader: takes tokens of a lone choice while the stream is waited for; all others, the last
                one and errors come from the stream.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a choice early, but not the last one (`aclose()`); unknown ids are a no-op."""
        ...


@dataclass(slots=True)
class LateTokens:
    """Tokens of a request that are known at its end, and charged then."""

    number: int = 0


@dataclass(frozen=True, slots=True)
class ServingContext:
    """policy: in force now.  clock: monotonic seconds."""

    backend: Backend
    tokenizer: Tokenizer
    metrics: Metrics
    policy: Callable[[], PolicyConfig]
    clock: Callable[[], float]
    tenants: Tenants
    front_end: FrontEnd
    others: OtherModels
    parsers: ModelParsers = NO_PARSERS
    open_answers: OpenAnswers = field(default_factory=OpenAnswers)

    @property
    def model_name(self) -> str:
        return self.backend.model_name

    @property
    def limits(self) -> ModelLimits:
        backend, eos = self.backend, self.tokenizer.eos_token_ids
        return ModelLimits(backend.max_model_len, backend.vocab_size, eos, backend.length_note)

    @contextmanager
    def limited(self, tenant: str, tier: Tier, demand: Demand) -> Iterator[LateTokens]:
        """Hold a request to its tenant's limits.  Raises RequestError 429 beyond them."""
        start, late = self.clock(), LateTokens()
        refusal = self.tenants.begin(tenant, tenant_policy(self.policy(), tenant), demand)
        if refusal is not None:
            self.metrics.qos_rejected.labels(refusal.code, tier).inc()
            raise RequestError(
                refusal.message,
                status=TOO_MANY_REQUESTS,
                code=refusal.code,
                retry_after_seconds=refusal.retry_after_seconds,
            )
        try:
            yield late
        finally:
            self.tenants.end(tenant, demand, late.number, self.clock() - start)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """specs: for each prompt its n choices.  tenant: "" without API keys.  derender: None = our own
    parsers.  lost: what its choices have lost before they came here.
    """

    specs: list[list[RequestSpec]]
    prefill: PrefillMode
    hints: RouteHints
    rules: AnswerRules
    arrival_seconds: float
    tenant: str
    derender: Derender | None = None
    streams: bool = True
    lost: tuple[str, ...] = ()


class Generation:
    """`prefill` and `degraded` are known with the first delta."""

    def __init__(self, serving: ServingContext, plan: GenerationRequest) -> None:
        self._serving = serving
        self._plan = plan
        self._specs = [spec for specs in plan.specs for spec in specs]
        self.num_choices = len(self._specs)
        self._n = len(plan.specs[0])  # choices of each prompt
        self._num_prompt_tokens = sum(len(specs[0].prompt) for specs in plan.specs)
        rules = plan.rules
        if plan.derender is not None:
            rules = replaced(rules, stop=(), new_parser=Unread, shows_tokens=True)
        self._choices = [
            Choice(index, serving.tokenizer, rules) for index in range(self.num_choices)
        ]
        self._timers = [self._timer(spec) for spec in self._specs]
        self._reasons: dict[int, str] = {}  # finish reasons that the client gets, by choice
        self._running = [len(specs) for specs in plan.specs]  # choices, of each prompt
        self._merged: Merged[Generated] | None = None
        self._gate: ReaderGate[Delta] = ReaderGate()
        self._is_cut = False  # a stop string ended a choice that the engine would go on with
        self.prefill: PrefillPlace | None = None
        self.degraded: tuple[str, ...] = ()

    def _timer(self, spec: RequestSpec) -> ChoiceTimer:
        slo = slo_of(spec, self._serving.policy().slo)
        return ChoiceTimer(
            self._serving.metrics, self._plan.arrival_seconds, tier_of(spec.priority), slo
        )

    def deltas(self) -> AsyncGenerator[Delta, None]:
        """Raises RequestError as the backend does, 429 beyond the tenant's limits."""
        derender = self._plan.derender
        return self._own_deltas() if derender is None else self._read_by_engine(derender)

    async def _read_by_engine(self, derender: Derender) -> AsyncGenerator[Delta, None]:
        plan = self._plan
        streams = plan.streams or bool(plan.rules.stop)  # to end it where a stop string does
        choices = [
            EngineChoice(derender, spec.prompt, plan.rules, streams=streams) for spec in self._specs
        ]
        num_left = len(choices)
        sources = [self._feed(choices), *(choice.deltas() for choice in choices)]
        async with aclosing(Merged(sources)) as deltas:
            async for delta in deltas:
                if delta.finish_reason is None:
                    yield delta
                    continue
                self._reasons[delta.index] = delta.finish_reason
                yield delta
                num_left -= 1
                if delta.stop_string is not None:
                    self._end_early(delta.index)
                if self._is_cut and not num_left:
                    return

    async def _feed(self, choices: list[EngineChoice]) -> AsyncGenerator[Delta, None]:
        """Give each choice its tokens; yields nothing."""
        async with aclosing(self._own_deltas()) as deltas:
            async for delta in deltas:
                choices[delta.index].feed(delta)
        return
        yield

    async def _own_deltas(self) -> AsyncGenerator[Delta, None]:
        with self._allowed():
            try:
                async with aclosing(self._generated()) as stream:
                    async for generated in stream:
                        if (delta := self._delta(generated)) is None:
                            continue
                        yield delta
                        if delta.finish_reason is not None and self._is_over(generated):
                            return  # closes the stream; one that was not cut ends by itself
            except RequestError as e:
                raise with_field(e, self._plan.rules.constraint_param) from e
            if any(self._running):
                raise RuntimeError(
                    f"the backend ended with {sum(self._running)} choices unfinished"
                )

    @contextmanager
    def _allowed(self) -> Iterator[None]:
        demand = Demand(self._num_prompt_tokens, self.num_choices)
        tier = tier_of(self._specs[0].priority)
        with self._serving.limited(self._plan.tenant, tier, demand) as late:
            try:
                yield
            finally:
                late.number = sum(choice.num_tokens for choice in self._choices)

    def follow(self, reader: Reader[Delta]) -> None:
        """Have later deltas taken by `reader` where no stop string may end the lone choice."""
        self._gate.reader = reader

    def _delta(self, generated: Generated) -> Delta | None:
        """None where the token was made before the engine knew of the stop string."""
        if generated.notes:
            merge_events(generated.notes)
        choice = self._choices[generated.index]
        if choice.finish_reason is not None:
            return None
        if generated.prefill is not None:
            self.prefill = self.prefill or generated.prefill
        timer = self._timers[generated.index]
        timer.token(generated.token, self._serving.clock())
        delta = choice.feed(generated.token)
        if delta.finish_reason is not None:
            self._reasons.setdefault(generated.index, delta.finish_reason)
            timer.finished("length" if delta.finish_reason == "length" else "stop")
            self._running[generated.index // self._n] -= 1
        lost = (*self._plan.lost, *generated.degraded) if delta.is_first else generated.degraded
        if not lost:
            return delta
        self.degraded = self.degraded or lost
        return replace(delta, degraded=lost)

    def _is_over(self, last: Generated) -> bool:
        if last.token.finish_reason is None:
            self._end(last.index)
        return self._is_cut and not any(self._running)

    def _end(self, index: int) -> None:
        """Have the engine end a choice, which a stop string has ended."""
        self._is_cut = True
        prompt = index // self._n
        if self._running[prompt]:
            self._serving.backend.abort(self._specs[index].request_id)
        elif self._merged is not None:
            self._merged.end(prompt)

    def _end_early(self, index: int) -> None:
        """End a choice where the engine would have gone on."""
        choice = self._choices[index]
        if choice.finish_reason is None:
            choice.finish_reason = "stop"
            self._timers[index].finished("stop")
            self._running[index // self._n] -= 1
            self._end(index)

    def usage(self) -> Usage:
        completion = sum(choice.num_tokens for choice in self._choices)
        reasoning = sum(choice.num_reasoning_tokens for choice in self._choices)
        cached = sum(choice.cached_tokens for choice in self._choices[:: self._n])
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=completion,
            total_tokens=self._num_prompt_tokens + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning)
            if reasoning
            else None,
        )

    def figures(self) -> dict[str, int | float | str]:
        """Tokens and seconds so far; a mean gap only where there was one."""
        usage, arrival = self.usage(), self._plan.arrival_seconds
        begun = [timer for timer in self._timers if timer.num_tokens]
        gaps = sum(timer.num_tokens - 1 for timer in begun)
        found: dict[str, int | float | str] = {
            "model": self._specs[0].adapter or self._serving.model_name,
            "choices": self.num_choices,
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "seconds": self._serving.clock() - arrival,
        }
        if begun:
            found["ttft_seconds"] = min(timer.first for timer in begun) - arrival
        if gaps:
            found["itl_seconds"] = sum(timer.last - timer.first for timer in begun) / gaps
        return found

    def finish_reasons(self) -> str:
        """Each once."""
        reasons = (self._reasons.get(index, "unfinished") for index in range(self.num_choices))
        return ",".join(sorted(set(reasons)))

    def _generated(self) -> Stream[Generated]:
        backend, plan = self._serving.backend, self._plan
        # for a body that came slowly, and to be read
        waited = self._serving.clock() - plan.arrival_seconds
        prompts = [[aged(spec, waited) for spec in specs] for specs in plan.specs]
        is_pushed = self.num_choices == 1 and not plan.rules.stop and plan.derender is None
        reader = Mapped(self._delta, self._gate) if is_pushed else None
        streams = [backend.generate(specs, plan.prefill, plan.hints, reader) for specs in prompts]
        if len(streams) == 1:
            return streams[0]
        self._merged = Merged(
            [_counted_from(stream, position * self._n) for position, stream in enumerate(streams)]
        )
        return self._merged


async def _counted_from(
    stream: Stream[Generated], first_index: int
) -> AsyncGenerator[Generated, None]:
    async with aclosing(stream):
        async for generated in stream:
            yield replace(generated, index=first_index + generated.index)
