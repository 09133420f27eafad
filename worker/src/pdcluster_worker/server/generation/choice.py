"""One choice of a request: its tokens in, the parts of its answer out."""

from collections.abc import Sequence
from dataclasses import dataclass

from pdcluster_schema.qos import Tier
from pdcluster_worker.messages.requests import FinishReason, Token
from pdcluster_worker.metrics import Metrics
from pdcluster_worker.routing.qos.load_shedding import LatencySlo
from pdcluster_worker.server.schemas.requests import Generate
from pdcluster_worker.server.schemas.structured import constraint_param
from pdcluster_worker.server.text.events import (
    AnswerReason,
    Delta,
    NewParser,
    PlainText,
    ToolCallEnd,
    held_back,
)
from pdcluster_worker.server.text.tokenizer import Detokenizer, Piece, Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """stop: strings, in the text after the first `min_tokens` tokens.
    shows_tokens: deltas carry the tokens themselves.
    ends_by_calls: finish by "tool_calls"; OpenAI has "stop" where the request named the tool.
    constraint_param: the field at fault where the answer cannot be constrained.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    shows_tokens: bool = False
    ends_by_calls: bool = True
    new_parser: NewParser = PlainText
    constraint_param: str | None = None


def rules_of(request: Generate, prompt_logprobs: int | None) -> AnswerRules:
    return AnswerRules(
        stop=tuple(request.stop or ()),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
        shows_tokens=bool(request.return_token_ids) or prompt_logprobs is not None,
        constraint_param=constraint_param(request),
    )


class StopStrings:
    """found: the stop string that ended the text.  include: keep it."""

    found: str | None = None

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""

    def feed(self, piece: str) -> tuple[str, bool]:
        """Returns what may be shown now, and True once a stop string ended the text."""
        if not self._stops:
            return piece, False
        text = self._held + piece
        ends = [
            (place + len(stop), place, stop)
            for stop in self._stops
            if (place := text.find(stop)) >= 0
        ]
        if ends:
            end, place, self.found = min(ends)
            return text[: end if self._include else place], True
        shown = len(text) - held_back(text, self._stops)
        self._held = text[shown:]
        return text[:shown], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Choice:
    def __init__(self, index: int, tokenizer: Tokenizer, rules: AnswerRules) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.cached_tokens = 0
        self.finish_reason: AnswerReason | None = None
        self._tokenizer = tokenizer
        self._rules = rules
        self._parser = rules.new_parser()
        self._detokenizer = Detokenizer()
        self._stops = StopStrings(rules.stop, include=rules.include_stop)
        self._offset = 0  # characters decoded so far, those held back included
        self._has_calls = False

    def feed(self, token: Token) -> Delta:
        is_first = self.num_tokens == 0
        self.cached_tokens = max(self.cached_tokens, token.cached_tokens)
        self.num_tokens += 1
        self.num_reasoning_tokens += self._parser.is_reasoning
        scored = () if token.logprob is None else ((token, self._offset),)
        decoded = self._decode(token)
        self._offset += len(decoded)
        text, stopped = self._visible(decoded)
        if token.finish_reason and not stopped:
            text += self._stops.flush()
        is_last = stopped or token.finish_reason is not None
        parts = tuple(self._parser.feed(text))
        if is_last:
            parts = (*parts, *self._parser.end())
        for part in parts:
            if isinstance(part, ToolCallEnd):
                self._has_calls = True
        if is_last:
            self.finish_reason = self._reason(token, stopped)
        made = (token,) if self._rules.shows_tokens else ()
        reason, stop_string = self.finish_reason, self._stops.found
        return Delta(
            self.index, parts, scored, is_first, reason, made=made, stop_string=stop_string
        )

    def _reason(self, token: Token, stopped: bool) -> AnswerReason:
        if token.finish_reason == "length" and not stopped:
            return "length"
        return "tool_calls" if self._has_calls and self._rules.ends_by_calls else "stop"

    def _decode(self, token: Token) -> str:
        piece = self._tokenizer.piece(token.token_id)
        text = "" if self._is_hidden(token, piece) else self._detokenizer.feed(piece)
        return text + self._detokenizer.flush() if token.finish_reason else text

    def _is_hidden(self, token: Token, piece: Piece) -> bool:
        if token.finish_reason == "stop" and not self._rules.include_stop:
            return True  # the engine ended it by this token: eos or a stop token id
        if not (self._rules.skip_special and self._tokenizer.is_special(token.token_id)):
            return False
        return piece.text not in self._parser.markers

    def _visible(self, decoded: str) -> tuple[str, bool]:
        if self.num_tokens <= self._rules.min_tokens:
            return decoded, False
        return self._stops.feed(decoded)


class ChoiceTimer:
    """first, last: when these tokens came."""

    def __init__(
        self, metrics: Metrics, arrival_seconds: float, tier: Tier, slo: LatencySlo
    ) -> None:
        self._metrics = metrics
        self._tier = tier
        self._slo = slo
        self._arrival = arrival_seconds
        self.first = 0.0
        self.last = 0.0
        self.num_tokens = 0

    def token(self, token: Token, now: float) -> None:
        if self.num_tokens == 0:
            self.first = now
            self._metrics.time_to_first_token_seconds.observe(now - self._arrival)
            self._count("ttft", now - self._arrival, self._slo.ttft_seconds)
            self._observe_phases(token)
        else:
            self._metrics.inter_token_latency_seconds.observe(now - self.last)
        self.last = now
        self.num_tokens += 1

    def finished(self, reason: FinishReason) -> None:
        self._metrics.e2e_request_latency_seconds.observe(self.last - self._arrival)
        self._metrics.request_success.labels(reason).inc()
        if self.num_tokens > 1:
            tpot = (self.last - self.first) / (self.num_tokens - 1)
            self._metrics.time_per_output_token_seconds.observe(tpot)
            if self._slo.tpot_seconds is not None:
                self._count("tpot", tpot, self._slo.tpot_seconds)

    def _count(self, objective: str, seconds: float, bound: float) -> None:
        outcome = "met" if seconds <= bound else "missed"
        self._metrics.qos_slo.labels(objective, self._tier, outcome).inc()

    def _observe_phases(self, token: Token) -> None:
        for phase, seconds in (("queue", token.queue_seconds), ("prefill", token.prefill_seconds)):
            if seconds is not None:
                self._metrics.ttft_phase_seconds.labels(phase).observe(seconds)
