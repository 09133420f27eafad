"""The search: profiles of engines in, placements within an objective out.  Pure."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pdctl.sizing.objective import LoadWindow, Objective, OfferedLoad
from pdctl.sizing.profile import DECODE_BUDGET, EngineProfile, prefill_budget
from pdctl.sizing.waiting import MAX_UTILIZATION, max_utilization, streams_at, wait_seconds

Kind = Literal["aggregated", "split"]


@dataclass(frozen=True)
class PlannedRole:
    """batch: prompts of a prefill, or streams of a rank; max_batched_tokens: of its engine."""

    role: str
    profile: EngineProfile
    workers: int
    batch: int
    max_batched_tokens: int

    @property
    def gpus(self) -> int:
        return self.workers * self.profile.layout.gpus


@dataclass(frozen=True)
class Placement:
    """utilization: of the workers that prefill; transfer_seconds: of one prompt's KV."""

    kind: Kind
    roles: tuple[PlannedRole, ...]
    requests_per_second: float
    ttft_seconds: float
    itl_seconds: float
    mean_itl_seconds: float
    utilization: float
    output_tokens: int
    transfer_seconds: float = 0.0

    @property
    def gpus(self) -> int:
        return sum(role.gpus for role in self.roles)

    @property
    def warnings(self) -> list[str]:
        """Reasons not to rely on it."""
        texts = (role.profile.warning for role in self.roles)
        return list(dict.fromkeys(text for text in texts if text))

    @property
    def tokens_per_second(self) -> float:
        return self.requests_per_second * self.output_tokens

    @property
    def per_gpu(self) -> float:
        return self.tokens_per_second / self.gpus

    @property
    def per_user(self) -> float:
        """Tokens per second of one stream."""
        return 1.0 / self.mean_itl_seconds

    @property
    def gpus_of(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for role in self.roles:
            found[role.profile.gpu] = found.get(role.profile.gpu, 0) + role.gpus
        return found

    def cost_per_hour(self, prices: Mapping[str, float]) -> float | None:
        """None where a price is missing."""
        if any(gpu not in prices for gpu in self.gpus_of):
            return None
        return sum(number * prices[gpu] for gpu, number in self.gpus_of.items())

    def value(self, prices: Mapping[str, float]) -> float:
        """Tokens per second for a GPU, or for a unit of price where prices are given."""
        return self.tokens_per_second / ((prices and self.cost_per_hour(prices)) or self.gpus)


@dataclass(frozen=True)
class SearchInput:
    """gpus: at hand, by type; links: bytes per second of one GPU; prompt_kv_bytes: of the prompt
    that TTFT is of; demand: that a fleet holds with the fewest, None = all GPUs at hand.
    """

    objective: Objective
    gpus: Mapping[str, int]
    links: Mapping[str, float]
    prompt_kv_bytes: float
    prices: Mapping[str, float] = field(default_factory=dict)
    demand: OfferedLoad | None = None


def placements(
    profiles: Sequence[EngineProfile], given: SearchInput, *, with_splits: bool = True
) -> list[Placement]:
    """Those within the TTFT objective, of every speed; the ITL objective is left to the caller."""
    found = [one for profile in profiles for one in _aggregated(profile, given)]
    return [*found, *_splits(profiles, given)] if with_splits else found


def best(
    found: Iterable[Placement], given: SearchInput, kind: Kind | None = None
) -> list[Placement]:
    """The best within both objectives, of each kind, GPU types and layouts; best first."""
    chosen: dict[object, Placement] = {}
    for one in found:
        if one.itl_seconds > given.objective.itl_seconds or kind not in (None, one.kind):
            continue
        key = (one.kind, *((role.profile.gpu, role.profile.layout) for role in one.roles))
        if key not in chosen or _rank(one, given) > _rank(chosen[key], given):
            chosen[key] = one
    return sorted(chosen.values(), key=lambda one: _rank(one, given), reverse=True)


def _rank(one: Placement, given: SearchInput) -> tuple[float, float]:
    return one.value(given.prices), one.tokens_per_second


def front(found: Iterable[Placement], kind: Kind) -> list[Placement]:
    """Those of a kind that no other beats in tokens/s per GPU and per user; slowest user first."""
    ordered = sorted(
        (one for one in found if one.kind == kind), key=lambda one: (-one.per_user, -one.per_gpu)
    )
    kept: list[Placement] = []
    for one in ordered:
        if not kept or one.per_gpu > kept[-1].per_gpu:
            kept.append(one)
    return kept[::-1]


def fastest(profiles: Sequence[EngineProfile]) -> tuple[float, float]:
    """Least TTFT and ITL in seconds, without any other request."""
    return (
        min(min(each.prefill.values()) for each in profiles),
        min(min(each.decode.values()) for each in profiles),
    )


@dataclass(frozen=True)
class _MixedWorker:
    """A rank with so many streams: its steps, and how often one carries a chunk of a prompt.

    chunks: of the mean prompt; long_seconds: that the prompt of TTFT takes more
    """

    profile: EngineProfile
    streams: int
    budget: int
    chunks: float
    mixed_seconds: float
    plain_seconds: float
    share: float
    long_seconds: float

    @property
    def mean_seconds(self) -> float:
        return self.share * self.mixed_seconds + (1.0 - self.share) * self.plain_seconds

    @property
    def prefill_seconds(self) -> float:
        return self.chunks * self.mixed_seconds

    def itl_seconds(self, percentile: float | None) -> float:
        if percentile is None:
            return self.mean_seconds
        return self.plain_seconds if self.share <= 1.0 - percentile / 100.0 else self.mixed_seconds

    def busy(self, window: LoadWindow, steps: int) -> float:
        """Ranks that a load needs: they decode in each step, and some steps carry a chunk."""
        chunked = self.chunks * (self.mixed_seconds - self.plain_seconds) * window.prompts
        decoded = steps / self.streams * self.plain_seconds * window.answers
        return max(chunked + decoded, self.prefill_seconds * window.prompts)


def _mixed_worker(
    profile: EngineProfile, budget: int, streams: int, goal: Objective
) -> _MixedWorker | None:
    """None where its prompts need all steps, or its streams more KV than there is."""
    chunk, scatter = budget - streams, profile.scatter
    if chunk < 1 or streams * sum(goal.stream) > profile.kv_of(budget):
        return None
    tokens = goal.input_tokens - scatter.cached_tokens
    chunks = tokens / chunk
    share = streams * chunks / goal.steps
    if share >= 1.0:
        return None
    plain = profile.decode_seconds(streams)
    mixed = profile.mixed[budget, streams] + scatter.uneven_seconds / chunks
    # a long prompt has more chunks, and attends to more in each than the mean one
    attended = scatter.long_seconds - scatter.long_tokens / tokens * min(profile.prefill.values())
    more = max(1.0, chunks + scatter.long_tokens / chunk) - max(1.0, chunks)
    long = more * mixed + max(0.0, attended)
    return _MixedWorker(profile, streams, budget, chunks, mixed, plain, share, long)


def _aggregated(profile: EngineProfile, given: SearchInput) -> Iterator[Placement]:
    """Each step decodes for all streams; as many steps as the prompts need carry a chunk, too."""
    goal = given.objective
    for budget, streams in profile.mixed:
        worker = _mixed_worker(profile, budget, streams, goal)
        if worker is None:
            continue
        itl = worker.itl_seconds(goal.percentile)
        for workers, rate, used in _mixed_fleets(worker, given):
            service = worker.prefill_seconds
            spread = profile.scatter.variation
            # each rank has its own queue, as a request stays where it was sent
            wait = wait_seconds(service, 1, min(used, 0.999), goal.percentile, spread)
            ttft = max(1.0, worker.chunks) * worker.mixed_seconds + worker.long_seconds + wait
            if ttft > goal.ttft_seconds:
                continue
            role = PlannedRole("mixed", profile, workers, streams, budget)
            mean, tokens = worker.mean_seconds, goal.output_tokens
            yield Placement("aggregated", (role,), rate, ttft, itl, mean, used, tokens)
            break


def _mixed_fleets(worker: _MixedWorker, given: SearchInput) -> Iterator[tuple[int, float, float]]:
    """Workers, their requests per second and their utilization by prompts; fewest workers first."""
    layout, steps = worker.profile.layout, given.objective.steps
    most = given.gpus[worker.profile.gpu] // layout.gpus
    if given.demand is None:
        used = worker.share * worker.mixed_seconds / worker.mean_seconds
        streams = MAX_UTILIZATION * most * layout.data * worker.streams
        rate = streams / (steps * worker.mean_seconds)
        if most and used <= 1.0:
            yield most, rate, used
        return
    busy = given.demand.at(lambda window: worker.busy(window, steps)) / MAX_UTILIZATION
    prompts = worker.prefill_seconds * given.demand.prompts
    for workers in range(max(1, math.ceil(busy / layout.data)), most + 1):
        used = prompts / (workers * layout.data)
        if used <= MAX_UTILIZATION:
            yield workers, given.demand.requests_per_second, used


@dataclass(frozen=True)
class _Prefill:
    """rate: the most in requests per second; utilization: at it, or at the demand."""

    role: PlannedRole
    rate: float
    ttft_seconds: float
    utilization: float
    transfer_seconds: float


def _splits(profiles: Sequence[EngineProfile], given: SearchInput) -> Iterator[Placement]:
    kinds = dict.fromkeys((profile.gpu, profile.layout.tensor) for profile in profiles)
    prefills = {kind: _prefills(profiles, given, kind) for kind in kinds}
    for profile in profiles:
        for streams in profile.decode:
            if decode := _decode(profile, streams, given):
                kind = profile.gpu, profile.layout.tensor
                yield from _matched(prefills[kind], decode, given)


def _prefills(
    profiles: Sequence[EngineProfile], given: SearchInput, decode: tuple[str, int]
) -> list[_Prefill]:
    """The fastest of each GPU type and number of GPUs.  decode: type and tensor ranks beside it.

    A prompt's KV lies on one data-parallel rank, so it has the links of that rank alone.
    """
    goal, (gpu, width) = given.objective, decode
    chosen: dict[tuple[str, int], _Prefill] = {}
    needed = given.demand.prompts if given.demand else 0.0
    for profile in profiles:
        gpus, scatter = profile.layout.gpus, profile.scatter
        link = min(given.links[profile.gpu], given.links[gpu])
        transfer = given.prompt_kv_bytes / (link * min(profile.layout.tensor, width))
        for prompts, seconds in profile.prefill.items():
            budget = prefill_budget(prompts, goal.input_tokens)
            if prompts * goal.input_tokens + scatter.long_tokens > profile.kv_of(budget):
                continue
            spread = scatter.variation / prompts
            for workers in range(1, given.gpus[profile.gpu] // gpus + 1):
                servers, fixed = workers * profile.layout.data, seconds + scatter.long_seconds
                left = goal.ttft_seconds - fixed - transfer
                used = max_utilization(seconds, servers, left, goal.percentile, spread)
                rate = used * servers * prompts / seconds
                key = (profile.gpu, workers * gpus)
                if used > 0.0 and rate >= needed and not _is_slower(rate, chosen.get(key)):
                    used *= needed / rate if needed else 1.0
                    wait = wait_seconds(seconds, servers, used, goal.percentile, spread)
                    role = PlannedRole("prefill", profile, workers, prompts, budget)
                    chosen[key] = _Prefill(role, rate, fixed + transfer + wait, used, transfer)
    return list(chosen.values())


def _is_slower(rate: float, than: _Prefill | None) -> bool:
    return than is not None and rate <= than.rate


@dataclass(frozen=True)
class _Decode:
    """rate: the most of one worker, in requests per second, with so many streams on each rank.

    That of MAX_UTILIZATION of the streams, for with all of them busy each request would wait.
    """

    profile: EngineProfile
    streams: int
    rate: float
    mean_itl_seconds: float
    itl_seconds: float


def _decode(profile: EngineProfile, streams: int, given: SearchInput) -> _Decode | None:
    """None where the streams do not fit into the KV cache."""
    goal = given.objective
    most = streams_at(streams, goal.percentile)
    if most * sum(goal.stream) > profile.kv_of(DECODE_BUDGET):
        return None
    mean = profile.decode[streams]
    rate = MAX_UTILIZATION * profile.layout.data * streams / (goal.steps * mean)
    return _Decode(profile, streams, rate, mean, profile.decode_seconds(most))


def _matched(
    prefills: Iterable[_Prefill], decode: _Decode, given: SearchInput
) -> Iterator[Placement]:
    """Each prefill with as many decode workers as it feeds, or as there are GPUs for."""
    profile, demand = decode.profile, given.demand
    for prefill in prefills:
        taken = prefill.role.gpus if prefill.role.profile.gpu == profile.gpu else 0
        free = (given.gpus[profile.gpu] - taken) // profile.layout.gpus
        if demand is None:
            whole = int(prefill.rate / decode.rate)
            counts = {min(free, whole), min(free, whole + 1)} - {0}
        else:
            needed = max(1, math.ceil(demand.answers / decode.rate))
            counts = {needed} if needed <= free else set()
        for workers in counts:
            rate = min(prefill.rate, workers * decode.rate)
            share = rate / prefill.rate if demand is None else 1.0
            role = PlannedRole("decode", profile, workers, decode.streams, DECODE_BUDGET)
            yield Placement(
                "split",
                (prefill.role, role),
                rate if demand is None else demand.requests_per_second,
                prefill.ttft_seconds,
                decode.itl_seconds,
                decode.mean_itl_seconds,
                prefill.utilization * share,
                given.objective.output_tokens,
                prefill.transfer_seconds,
            )
