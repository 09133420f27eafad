"""Puts drafts behind the decodes of a plan while they pay, by what became of earlier ones."""

# With n rows a step takes a + b * n seconds.  d drafts of which a share s is right give n + s * d
# tokens in a + b * (n + d) seconds and the seconds of drafting them: per token that is less than
# without drafts if s > n * (b + seconds of drafting one) / (a + b * n).  One stream gains by almost
# any share, a large batch by none that is below 1.  A request whose drafts do not pay is given
# none, but one now and then to see whether that has changed.

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.in_flight import InFlightStep
from pdcluster_worker.engine.ports import Drafter
from pdcluster_worker.engine.request import EngineRequest, Scheduled, Status
from pdcluster_worker.engine.scheduler.base import Schedule
from pdcluster_worker.engine.stats import Counters
from pdcluster_worker.messages.engine_settings import EngineSettings, SpeculationSettings

FIRST_SHARE = 0.5
"""Share of a request that has not been drafted yet."""
NEW_WEIGHT = 0.2
"""Weight of one verification in a request's share."""
RETURN = 0.005
"""Fraction of the way back to the first share, per step in which a low share stops the drafts."""

FORGET = 0.97
"""Weight that earlier figures keep at each step."""
ROW_COST = 0.02
"""Seconds of a further row as a share of a step's, where nothing is measured."""
DOUBT = 4.0
"""Rows squared by which the sizes of steps must vary before what is measured outweighs that."""


@dataclass(slots=True)
class AcceptanceRate:
    """Share of a request's recent drafts that is right."""

    value: float = FIRST_SHARE

    def add(self, num_drafts: int, num_accepted: int) -> None:
        self.value += NEW_WEIGHT * (num_accepted / num_drafts - self.value)

    def drift(self) -> None:
        self.value += RETURN * (FIRST_SHARE - self.value)


class DecodeStepTimes:
    """Seconds of decode steps by their rows: a line through the last of them."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._squares = self._products = 0.0
        self._draft_seconds = 0.0

    def add(self, num_rows: int, seconds: float) -> None:
        for name, value in (("weight", 1.0), ("rows", num_rows), ("seconds", seconds)):
            self._fade(name, value)
        self._fade("squares", num_rows * num_rows)
        self._fade("products", num_rows * seconds)

    def add_drafting(self, num_drafts: int, seconds: float) -> None:
        self._draft_seconds += 0.1 * (seconds / max(1, num_drafts) - self._draft_seconds)

    def least_share(self, num_rows: int) -> float:
        """Drafts pay above this share of right ones, in a step of so many rows; 0 to 1."""
        if self._weight == 0.0:
            return 0.0
        mean_rows, mean_seconds = self._rows / self._weight, self._seconds / self._weight
        if mean_seconds <= 0.0:
            return 0.0
        variance = max(0.0, self._squares / self._weight - mean_rows**2)
        covariance = self._products / self._weight - mean_rows * mean_seconds
        row_seconds = max(0.0, (covariance + DOUBT * ROW_COST * mean_seconds) / (variance + DOUBT))
        whole = max(mean_seconds + row_seconds * (num_rows - mean_rows), row_seconds * num_rows)
        return min(1.0, num_rows * (row_seconds + self._draft_seconds) / whole)

    def _fade(self, name: str, value: float) -> None:
        setattr(self, f"_{name}", FORGET * getattr(self, f"_{name}") + value)


class Speculation:
    """Drafts of one engine.  looks_ahead: requests that may be drafted next wait for a step."""

    def __init__(
        self,
        settings: EngineSettings,
        tables: BlockTables,
        drafter: Drafter,
        clock: Callable[[], float],
        counts: Counters,
        *,
        looks_ahead: bool,
    ) -> None:
        self._counts = counts
        self._own = settings.speculation or SpeculationSettings()
        self._max_model_len = settings.max_model_len
        self._tables = tables
        self._drafter = drafter
        self._clock = clock
        self._looks_ahead = looks_ahead
        self._shares: dict[str, AcceptanceRate] = {}
        self._times = DecodeStepTimes()

    def extend(self, schedule: Schedule, num_running: int) -> None:
        """Add drafts to the plan's items; every draft has its slot when this returns."""
        most = self._own.disable_above_running
        if not schedule.items or (most is not None and num_running > most):
            return
        least_share = self._times.least_share(len(schedule.items))
        items = [
            item
            for item in schedule.items.values()
            if item.samples
            and item.request.target is None
            and self._pays(item.request, least_share)
        ]
        self._draft([item for item in items if _is_decode(item)], schedule)
        if self._looks_ahead:
            for request in (item.request for item in items):
                item = schedule.items[request]
                if not item.drafts and self._drafter.may_follow(request):
                    schedule.items[request] = replace(item, waits=True)

    def settle(self, item: Scheduled, num_accepted: int) -> None:
        """The step of these drafts has ended; the accepted ones are tokens of the request."""
        self._counts.count_drafts(len(item.drafts), num_accepted)
        if item.request.status is Status.FINISHED:
            return  # everything of it is given back
        self._share(item.request).add(len(item.drafts), num_accepted)
        self._tables.settle_drafts(item.request)

    def completed(self, step: InFlightStep, seconds: float) -> None:
        if step.work.kind == "decode":
            self._times.add(step.work.num_tokens, seconds)

    def forget(self, request: EngineRequest) -> None:
        self._shares.pop(request.request_id, None)
        self._drafter.forget(request.request_id)

    def _draft(self, items: list[Scheduled], schedule: Schedule) -> None:
        requested = [
            (item.request, most) for item in items if (most := self._most(item.request)) > 0
        ]
        if not requested or schedule.budget <= 0:
            return
        started = self._clock()
        drafts = self._drafter.draft(requested)
        num_drafts = 0
        for (request, _), tokens in zip(requested, drafts, strict=True):
            item = schedule.items[request]
            space = min(len(tokens), schedule.budget)
            if space <= 0:
                continue
            space = self._tables.grow_for_drafts(request, item.end, space)
            if space > 0:
                schedule.items[request] = replace(
                    item, num_tokens=1 + space, drafts=tuple(tokens[:space]), waits=True
                )
                schedule.budget -= space
                num_drafts += space
        if num_drafts:
            self._times.add_drafting(num_drafts, self._clock() - started)

    def _pays(self, request: EngineRequest, least_share: float) -> bool:
        share = self._share(request)
        if share.value > least_share or not self._own.adaptive:
            return True
        share.drift()
        return False

    def _most(self, request: EngineRequest) -> int:
        left = request.sampling.max_tokens - request.num_output_tokens
        return min(self._own.num_tokens, left - 1, self._max_model_len - request.num_tokens - 1)

    def _share(self, request: EngineRequest) -> AcceptanceRate:
        return self._shares.setdefault(request.request_id, AcceptanceRate())


def _is_decode(item: Scheduled) -> bool:
    """Return whether only a known output token is computed: the tokens after it can be guessed."""
    return (
        item.num_tokens == 1
        and item.request.num_prompt_tokens <= item.start < item.request.num_tokens
    )
