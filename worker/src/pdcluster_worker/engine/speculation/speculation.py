"""Puts drafts behind the decodes of a plan, and takes note of what became of them."""

from collections.abc import Callable

from msgspec.structs import replace

from pdcluster_worker.engine.block_table import BlockTables
from pdcluster_worker.engine.in_flight import InFlightStep
from pdcluster_worker.engine.ports import Drafter
from pdcluster_worker.engine.request import EngineRequest, Scheduled, Status
from pdcluster_worker.engine.scheduler import Schedule
from pdcluster_worker.engine.speculation.draft_budget import AcceptanceRate, DecodeStepTimes
from pdcluster_worker.engine.stats import SpeculationCounts
from pdcluster_worker.messages.engine_settings import EngineSettings, SpeculationSettings


class Speculation:
    """Drafts of one engine.  looks_ahead: requests that may be drafted next wait for a step."""

    def __init__(
        self,
        settings: EngineSettings,
        tables: BlockTables,
        drafter: Drafter,
        clock: Callable[[], float],
        counts: SpeculationCounts,
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
            if _goes_on(item) and self._pays(item.request, least_share)
        ]
        self._draft([item for item in items if _is_decode(item)], schedule)
        if self._looks_ahead:
            for item in items:
                self._wait(item.request, schedule)

    def settle(self, item: Scheduled, num_accepted: int) -> None:
        """The step of these drafts has ended; the accepted ones are tokens of the request."""
        self._counts.add(len(item.drafts), num_accepted)
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

    def _wait(self, request: EngineRequest, schedule: Schedule) -> None:
        item = schedule.items[request]
        if not item.drafts and self._drafter.may_follow(request):
            schedule.items[request] = replace(item, waits=True)

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


def _goes_on(item: Scheduled) -> bool:
    return item.samples and item.request.target is None


def _is_decode(item: Scheduled) -> bool:
    """Return whether only a known output token is computed: the tokens after it can be guessed."""
    return (
        item.num_tokens == 1
        and item.request.num_prompt_tokens <= item.start < item.request.num_tokens
    )
