"""The search: profiles of engines in, placements within an objective out.  Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from pdctl.sizing.waiting import max_utilization, streams_at, wait_seconds

Kind = Literal["aggregated", "split"]


@dataclass(frozen=True)
class Objective:
    """input_tokens, output_tokens: of a request; percentile: of both latencies, None = means."""

    input_tokens: int
    output_tokens: int
    ttft_seconds: float
    itl_seconds: float
    percentile: float | None = None

    @property
    def steps(self) -> int:
        """Decode steps of a request, whose first token comes from its prefill."""
        return max(1, self.output_tokens - 1)


@dataclass(frozen=True, order=True)
class RankLayout:
    """Ranks of one worker; is_expert_parallel: experts are spread over all of them."""

    tensor: int = 1
    data: int = 1
    is_expert_parallel: bool = False

    @property
    def gpus(self) -> int:
        return self.tensor * self.data

    def __str__(self) -> str:
        """
        >>> print(RankLayout(4), RankLayout(1, 8, True))
        TP4 DP8 EP8
        """
        names = [("TP", self.tensor), ("DP", self.data)]
        words = [f"{name}{size}" for name, size in names if size > 1]
        if self.is_expert_parallel:
            words.append(f"EP{self.gpus}")
        return " ".join(words) or "TP1"


@dataclass(frozen=True)
class EngineProfile:
    """Seconds of steps of one worker; sizes are of one data-parallel rank.

    prefill: by prompts at once; decode: by streams; mixed: by (maxBatchedTokens, streams), of a
    step whose chunk fills what the streams leave.  kv_tokens: what a rank's KV cache holds.
    warning: why the seconds are wrong, empty where nothing is known.
    """

    gpu: str
    layout: RankLayout
    prefill: Mapping[int, float]
    decode: Mapping[int, float]
    mixed: Mapping[tuple[int, int], float]
    kv_tokens: int
    source: str
    warning: str = ""

    def decode_seconds(self, streams: float) -> float:
        """Between two numbers of streams on a line, and beyond the last on its continuation."""
        known = sorted(self.decode)
        if len(known) < 2 or streams <= known[0]:
            return self.decode[known[0]]
        pairs = list(pairwise(known))
        low, high = next((pair for pair in pairs if streams <= pair[1]), pairs[-1])
        slope = (self.decode[high] - self.decode[low]) / (high - low)
        return self.decode[low] + slope * (streams - low)


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
    """gpus: at hand, by type; links: bytes per second of one GPU; prompt_kv_bytes: of a prompt."""

    objective: Objective
    gpus: Mapping[str, int]
    links: Mapping[str, float]
    prompt_kv_bytes: float
    prices: Mapping[str, float] = field(default_factory=dict)


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


def _aggregated(profile: EngineProfile, given: SearchInput) -> Iterator[Placement]:
    """Each step decodes for all streams; as many steps as the prompts need carry a chunk, too."""
    goal, layout = given.objective, profile.layout
    workers = given.gpus[profile.gpu] // layout.gpus
    tokens = goal.input_tokens + goal.output_tokens
    for (budget, streams), mixed in profile.mixed.items():
        chunk = budget - streams
        if workers < 1 or chunk < 1 or streams * tokens > profile.kv_tokens:
            continue
        chunks = goal.input_tokens / chunk
        share = streams * chunks / goal.steps
        if share >= 1.0:
            continue
        plain = profile.decode_seconds(streams)
        mean = share * mixed + (1.0 - share) * plain
        rare = goal.percentile is not None and share <= 1.0 - goal.percentile / 100.0
        itl = mean if goal.percentile is None else plain if rare else mixed
        utilization = share * mixed / mean
        servers = workers * layout.data
        if utilization > 1.0:
            continue
        wait = wait_seconds(chunks * mixed, servers, min(utilization, 0.999), goal.percentile)
        ttft = max(1.0, chunks) * mixed + wait
        if ttft > goal.ttft_seconds:
            continue
        rate = servers * streams / (goal.steps * mean)
        role = PlannedRole("mixed", profile, workers, streams, budget)
        yield Placement(
            "aggregated", (role,), rate, ttft, itl, mean, utilization, goal.output_tokens
        )


@dataclass(frozen=True)
class _Prefill:
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
    for profile in profiles:
        gpus = profile.layout.gpus
        link = min(given.links[profile.gpu], given.links[gpu])
        transfer = given.prompt_kv_bytes / (link * min(profile.layout.tensor, width))
        for prompts, seconds in profile.prefill.items():
            if prompts * goal.input_tokens > profile.kv_tokens:
                continue
            for workers in range(1, given.gpus[profile.gpu] // gpus + 1):
                servers, fixed = workers * profile.layout.data, seconds + transfer
                left = goal.ttft_seconds - fixed
                used = max_utilization(seconds, servers, left, goal.percentile)
                rate = used * servers * prompts / seconds
                key = (profile.gpu, workers * gpus)
                if used > 0.0 and (key not in chosen or rate > chosen[key].rate):
                    wait = wait_seconds(seconds, servers, used, goal.percentile)
                    budget = max(2048, -(-prompts * goal.input_tokens // 1024) * 1024)
                    role = PlannedRole("prefill", profile, workers, prompts, budget)
                    chosen[key] = _Prefill(role, rate, fixed + wait, used, transfer)
    return list(chosen.values())


@dataclass(frozen=True)
class _Decode:
    """rate: requests per second of one worker with so many streams on each rank."""

    profile: EngineProfile
    streams: int
    rate: float
    mean_itl_seconds: float
    itl_seconds: float


def _decode(profile: EngineProfile, streams: int, given: SearchInput) -> _Decode | None:
    """None where the streams do not fit into the KV cache."""
    goal = given.objective
    most = streams_at(streams, goal.percentile)
    if most * (goal.input_tokens + goal.output_tokens) > profile.kv_tokens:
        return None
    mean = profile.decode[streams]
    rate = profile.layout.data * streams / (goal.steps * mean)
    return _Decode(profile, streams, rate, mean, profile.decode_seconds(most))


def _matched(
    prefills: Iterable[_Prefill], decode: _Decode, given: SearchInput
) -> Iterator[Placement]:
    """Each prefill with as many decode workers as it feeds, or as there are GPUs for."""
    profile, goal = decode.profile, given.objective
    for prefill in prefills:
        taken = prefill.role.gpus if prefill.role.profile.gpu == profile.gpu else 0
        free = (given.gpus[profile.gpu] - taken) // profile.layout.gpus
        whole = int(prefill.rate / decode.rate)
        for workers in {min(free, whole), min(free, whole + 1)} - {0}:
            rate = min(prefill.rate, workers * decode.rate)
            role = PlannedRole("decode", profile, workers, decode.streams, 2048)
            yield Placement(
                "split",
                (prefill.role, role),
                rate,
                prefill.ttft_seconds,
                decode.itl_seconds,
                decode.mean_itl_seconds,
                prefill.utilization * rate / prefill.rate,
                goal.output_tokens,
                prefill.transfer_seconds,
            )
