"""Load, steps and times of a stock engine, from its HTTP traffic."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

MAX_STEPS = 1000  # of one report; more are dropped

FETCH_SECONDS = 30.0  # as long as a prefill engine keeps KV that is not requested


@dataclass(slots=True)
class _Posted:
    num_tokens: int
    since: float
    is_fetching: bool  # waits for KV; its prompt is not computed here
    is_timed: bool  # waits for no capacity and no other prompt
    is_watched: bool = True  # this rank has it, and shows that it makes progress
    num_made: int = 0  # tokens so far


@dataclass(slots=True)
class _StockStep:
    seconds: float
    requests: set[str] = field(default_factory=set)
    num_firsts: int = 0
    prefilled: int = 0
    decoded: int = 0

    @property
    def kind(self) -> str:
        """As in `EngineStats.steps`."""
        if not self.num_firsts:
            return "decode"
        return "prefill" if self.num_firsts == len(self.requests) else "mixed"


class StockLoad:
    """Counters of one engine, from when it is ready.

    A request gets at most one chunk of tokens in a step, so its second chunk begins the next step.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_steps = 0
        self.busy_seconds = self.prefill_seconds = self.decode_seconds = 0.0
        self.prompt_tokens = self.prefill_tokens = self.generation_tokens = 0
        self._clock = clock
        self._posted: dict[str, _Posted] = {}
        self._reserved: dict[str, int] = {}  # blocks of requests that wait for a peer
        self._busy_since = self._stepped = 0.0
        self._step: _StockStep | None = None
        self._steps: list[tuple[str, float]] = []
        self._batches: list[tuple[int, int, int, int]] = []

    def reserve(self, request_id: str, num_blocks: int) -> None:
        self._reserved[request_id] = num_blocks

    def begun(
        self,
        request_id: str,
        num_tokens: int,
        *,
        is_fetching: bool = False,
        is_new: bool = True,
        has_space: bool = True,
        is_watched: bool = True,
    ) -> None:
        """is_new: its prompt is to be counted; has_space: it waits for no other request to end."""
        now = self._clock()
        self._reserved.pop(request_id, None)
        if not self._posted:
            self._busy_since = self._stepped = now
        if is_new:
            self.prompt_tokens += num_tokens
        is_timed = has_space and not (is_fetching or self.to_prefill())
        self._posted[request_id] = _Posted(num_tokens, now, is_fetching, is_timed, is_watched)

    def made(self, request_id: str, num_tokens: int, *, num_cached: int = 0) -> float | None:
        """num_cached: of the prompt.  The first chunk returns the prefill's seconds, if timed."""
        posted = self._posted.get(request_id)
        if posted is None:
            return None
        step = self._step
        if step is None or request_id in step.requests:
            step = self._begin_step()
        step.requests.add(request_id)
        seconds = None
        if posted.num_made == 0 and not posted.is_fetching:
            seconds = self._count_prompt(step, posted, num_cached)
        step.decoded += num_tokens
        posted.num_made += num_tokens
        posted.is_fetching = False
        self.generation_tokens += num_tokens
        return seconds

    def prefilled(self, request_id: str, *, num_cached: int) -> float | None:
        """The prompt is computed for a peer; returns its seconds, if timed."""
        posted = self._posted.get(request_id)
        if posted is None:
            return None
        step = self._begin_step()
        step.requests.add(request_id)
        return self._count_prompt(step, posted, num_cached)

    def embedded(self, request_ids: Sequence[str], num_tokens: int) -> None:
        """The engine has answered these inputs, with so many tokens in all, at once."""
        step = self._begin_step()
        step.requests.update(request_ids)
        step.num_firsts += len(request_ids)
        step.prefilled += num_tokens
        self.prompt_tokens += num_tokens
        self.prefill_tokens += num_tokens

    def ended(self, request_id: str) -> None:
        self._reserved.pop(request_id, None)
        if self._posted.pop(request_id, None) is not None and not self._posted:
            self._end_step()
            self.busy_seconds += self._clock() - self._busy_since

    @property
    def has_work(self) -> bool:
        return bool(self._posted)

    @property
    def is_to_step(self) -> bool:
        """True with a request that does not wait for a peer: the engine should make progress."""
        return any(one.is_watched and not one.is_fetching for one in self._posted.values())

    @property
    def num_running(self) -> int:
        """Requests past their first token."""
        return sum(posted.num_made > 0 for posted in self._posted.values())

    @property
    def num_slots(self) -> int:
        """Requests at the engine, and those that will be once their KV comes."""
        return len(self._posted) + len(self._reserved)

    @property
    def num_receiving(self) -> int:
        """Requests that wait for a peer or its KV."""
        return len(self._reserved) + sum(one.is_fetching for one in self._posted.values())

    @property
    def reserved_blocks(self) -> int:
        return sum(self._reserved.values())

    def tokens_since(self, when: float) -> int:
        return sum(one.num_tokens for one in self._posted.values() if one.since >= when)

    def queued_tokens(self, when: float, num_fetches: int, num_prompts: int) -> int:
        """num_fetches, num_prompts: last requests sent before `when`, to fetch or to prefill."""
        old = [one for one in self._posted.values() if one.since < when and not one.num_made]
        fetches = [one.num_tokens for one in old if one.is_fetching]
        prompts = [one.num_tokens for one in old if not one.is_fetching]
        queued = fetches[::-1][:num_fetches] + prompts[::-1][:num_prompts]
        return sum(queued)

    def take_steps(self) -> tuple[list[tuple[str, float]], list[tuple[int, int, int, int]]]:
        """(steps, batches) since the last call, as in `EngineStats`."""
        taken = self._steps, self._batches
        self._steps, self._batches = [], []
        if self._posted:
            now = self._clock()
            self.busy_seconds += now - self._busy_since
            self._busy_since = now
        return taken

    def to_prefill(self) -> list[int]:
        """Tokens of each prompt to prefill."""
        return [
            one.num_tokens for one in self._posted.values() if not (one.num_made or one.is_fetching)
        ]

    def _begin_step(self) -> _StockStep:
        self._end_step()
        now = self._clock()
        step = self._step = _StockStep(now - self._stepped)
        self._stepped = now
        self.num_steps += 1
        return step

    def _count_prompt(self, step: _StockStep, posted: _Posted, num_cached: int) -> float | None:
        num_computed = max(0, posted.num_tokens - num_cached)
        step.num_firsts += 1
        step.prefilled += num_computed
        self.prefill_tokens += num_computed
        return self._clock() - posted.since if posted.is_timed else None

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        if step.kind == "prefill":
            self.prefill_seconds += step.seconds
        else:
            self.decode_seconds += step.seconds
        if len(self._steps) < MAX_STEPS:
            self._steps.append((step.kind, step.seconds))
            self._batches.append((len(step.requests), step.prefilled, step.decoded, 0))


class Fetches:
    """KV fetches that have no token yet, timed by vLLM's metrics, but not while in its queue.

    The metrics say how many fetches wait, run and have arrived, not which: in order of the queue,
    except one that a later fetch has overtaken, whose KV hangs.
    """

    def __init__(self) -> None:
        self._fetches: dict[str, tuple[int, float]] = {}  # (priority, when the engine got it)
        self._begun: dict[str, float] = {}  # since when, of those that have left the queue
        self._overtaken: set[str] = set()  # begun ones before which a later one had its token
        self._num_complete = 0

    def __len__(self) -> int:
        return len(self._fetches)

    def begun(self, request_id: str, priority: int, now: float) -> None:
        self._fetches[request_id] = priority, now

    def ended(self, request_id: str) -> None:
        self._overtaken.discard(request_id)
        priority, _ = self._fetches.pop(request_id, (0, 0.0))
        since = self._begun.pop(request_id, -math.inf)
        self._overtaken |= {
            one
            for one, begun in self._begun.items()
            if begun < since and self._fetches[one][0] <= priority
        }

    def seen(self, num_to_start: int, num_complete: int, requested_at: float) -> None:
        """num_to_start: fetches in the queue.  num_complete: arrived, without a token yet."""
        known = {one: place for one, place in self._fetches.items() if place[1] <= requested_at}
        in_order = sorted(known, key=lambda one: (self._begun.get(one, math.inf), known[one]))
        begun = in_order[: max(0, len(known) - num_to_start)]
        self._begun = {one: self._begun.get(one, requested_at) for one in begun}
        self._num_complete = num_complete

    def overdue(self, now: float) -> list[str]:
        in_order = sorted(self._begun, key=lambda one: (one in self._overtaken, self._begun[one]))
        under_way = in_order[self._num_complete :]
        return [one for one in under_way if now - self._begun[one] >= FETCH_SECONDS]
