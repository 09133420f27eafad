"""Drafts: from the request's own tokens, or by a smaller model over KV blocks of its own."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from pdcluster_worker.engine.block_pool import BlockPool
from pdcluster_worker.engine.block_table import ceil_div
from pdcluster_worker.engine.ports import EngineBrokenError, ModelRunner, Sample, execute
from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
from pdcluster_worker.messages.engine_settings import SpeculationSettings

_LETTERS = 0x110000
"""Tokens are searched as letters of a string; of a larger vocabulary some share one, and the guess
is a worse one.
"""


class NgramDrafter:
    """Drafts what followed the last tokens where they stood before.

    Keeps the tokens of each request as a string, which is searched at memory's speed.
    """

    def __init__(self, settings: SpeculationSettings) -> None:
        self._most, self._least = settings.prompt_lookup_max, settings.prompt_lookup_min
        self._texts: dict[str, str] = {}

    def may_follow(self, request: EngineRequest) -> bool:
        """A match of the known tokens often goes on with one token more."""
        return self._find(self._text(request), self._least) >= 0

    def draft(self, requested: Sequence[tuple[EngineRequest, int]]) -> list[list[int]]:
        return [self._draft(request, num_tokens) for request, num_tokens in requested]

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def _draft(self, request: EngineRequest, num_tokens: int) -> list[int]:
        text = self._text(request)
        if self._find(text, self._least) < 0:
            return []
        for length in range(self._most, self._least - 1, -1):
            if (place := self._find(text, length)) >= 0:
                # Of the request, whose tokens need not be letters.
                return request.tokens[place + length : place + length + num_tokens]
        return []

    def _find(self, text: str, length: int) -> int:
        """The earliest place of the last `length` letters before their own; -1 = none."""
        return text.find(text[-length:], 0, len(text) - 1) if len(text) > length else -1

    def _text(self, request: EngineRequest) -> str:
        text = self._texts.get(request.request_id, "")
        if len(text) < request.num_tokens:
            text += "".join([chr(token % _LETTERS) for token in request.tokens[len(text) :]])
            self._texts[request.request_id] = text
        return text


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """num_blocks, block_size: of its cache.  max_batched_tokens: of one batch."""

    num_blocks: int
    block_size: int
    max_batched_tokens: int
    max_model_len: int  # most tokens of a request; a longer one is not drafted
    vocab_size: int  # of the engine's own model; a draft beyond it ends the run
    draft_vocab_size: int  # of the draft model; a request with a token beyond it is not drafted


class ModelDrafter:
    """Drafts of a model that decodes ahead of the engine's own.  runner: of the draft model."""

    def __init__(self, runner: ModelRunner, sizes: DraftSizes) -> None:
        self.pool = BlockPool(sizes.num_blocks)
        self._runner = runner
        self._sizes = sizes
        self._shadows: dict[str, EngineRequest] = {}  # the one asked for last is at the end
        # tokens of each shadow that are its request's; drafts follow them
        self._num_known: dict[str, int] = {}
        self._unknown: set[str] = set()  # requests with a token that the draft model has not

    def may_follow(self, request: EngineRequest) -> bool:
        return (
            request.num_tokens < self._sizes.max_model_len
            and request.request_id not in self._unknown
        )

    def draft(self, requested: Sequence[tuple[EngineRequest, int]]) -> list[list[int]]:
        """A step of the draft model that fails gives no drafts."""
        num_requested = {request.request_id for request, _ in requested}
        goals: dict[EngineRequest, int] = {}
        shadows: list[EngineRequest | None] = []
        for request, num_tokens in requested:
            shadow = self._follow(request)
            if request.request_id in self._unknown:
                shadows.append(None)
                continue
            space = min(num_tokens, self._sizes.max_model_len - request.num_tokens)
            if space > 0 and self._grow(shadow, request.num_tokens + space, num_requested):
                goals[shadow] = request.num_tokens + space
                shadows.append(shadow)
            else:
                shadows.append(None)
        try:
            self._decode(goals)
        except EngineBrokenError:
            raise
        except Exception:
            logger.exception("the draft model failed requests=%d", len(goals))
            for request_id in num_requested:
                self.forget(request_id)
            return [[] for _ in requested]
        return [
            [] if shadow is None else shadow.tokens[request.num_tokens :]
            for (request, _), shadow in zip(requested, shadows, strict=True)
        ]

    def forget(self, request_id: str) -> None:
        if (shadow := self._shadows.pop(request_id, None)) is not None:
            del self._num_known[request_id]
            self._unknown.discard(request_id)
            self.pool.release(shadow.block_table)
            shadow.block_table = []
            self._runner.forget(request_id)

    def _follow(self, request: EngineRequest) -> EngineRequest:
        """The request's shadow with its tokens; what was computed of others is void."""
        shadow = self._shadows.pop(request.request_id, None)
        if shadow is None:
            sampling = replace(
                request.sampling, logprobs=None, prompt_logprobs=None, constraint=None
            )
            shadow = EngineRequest(request.request_id, [], request.num_prompt_tokens, sampling)
        self._shadows[request.request_id] = shadow
        same = self._num_known.get(request.request_id, 0)
        while (
            same < min(len(shadow.tokens), request.num_tokens)
            and shadow.tokens[same] == request.tokens[same]
        ):
            same += 1
        shadow.tokens[same:] = request.tokens[same:]
        if max(shadow.tokens[same:], default=0) >= self._sizes.draft_vocab_size:
            self._unknown.add(request.request_id)
        self._num_known[request.request_id] = request.num_tokens
        shadow.num_computed_tokens = min(shadow.num_computed_tokens, same, request.num_tokens - 1)
        return shadow

    def _grow(self, shadow: EngineRequest, num_tokens: int, num_requested: set[str]) -> bool:
        missing = ceil_div(num_tokens, self._sizes.block_size) - len(shadow.block_table)
        if missing <= 0:
            return True
        for request_id in [
            request_id for request_id in self._shadows if request_id not in num_requested
        ]:
            if missing <= self.pool.num_available:
                break
            self.forget(request_id)
        if missing > self.pool.num_available:
            return False
        shadow.block_table += self.pool.allocate(missing)
        return True

    def _decode(self, goals: dict[EngineRequest, int]) -> None:
        """Sample each shadow's tokens up to its goal, if the first batch catches up."""
        items: list[Scheduled] = []
        budget = self._sizes.max_batched_tokens
        # The nearest first: those that have caught up are one token behind.
        for shadow in sorted(
            goals, key=lambda shadow: shadow.num_tokens - shadow.num_computed_tokens
        ):
            num_tokens = min(shadow.num_tokens - shadow.num_computed_tokens, budget)
            if num_tokens > 0:
                items.append(Scheduled.of(shadow, num_tokens))
                budget -= num_tokens
        while items:
            going = self._step(items)
            items = [
                Scheduled.of(shadow, 1) for shadow in going if shadow.num_tokens < goals[shadow]
            ]

    def _step(self, items: list[Scheduled]) -> list[EngineRequest]:
        outcomes = execute(self._runner, Batch(tuple(items)))
        going: list[EngineRequest] = []
        for item, outcome in zip(items, outcomes, strict=True):
            item.request.num_computed_tokens += item.num_tokens
            if isinstance(outcome, Sample) and outcome.token_id < self._sizes.vocab_size:
                item.request.tokens.append(outcome.token_id)
                going.append(item.request)
        return going
