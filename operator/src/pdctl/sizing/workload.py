"""Lengths and rates of a trace, for a plan in place of one request's lengths.

Both kinds of trace become requests by their lengths, and windows of at least a minute in which
rates are means; arrivals within a window are taken as Poisson.
"""

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pdcluster_api.errors import InvalidTraceError
from pdcluster_api.traces.loads import LoadInterval, read_loads
from pdcluster_api.traces.requests import LoadTrace, TraceRequest, read_requests
from pdcluster_schema.faults import Fault
from pdctl.sizing.objective import (
    LengthDistribution,
    LoadWindow,
    OfferedLoad,
    Prompt,
    at_percentile,
)

_WINDOW_SECONDS, _MAX_WINDOWS = 60.0, 1440
CACHE_SHARE = 0.5  # of a worker's KV, which keeps prefixes; running streams have the rest
_SHORT_PERCENTILE = 5.0  # of all prompt tokens, which no prefill worker need compute

Sizes = tuple[int, int]
_Totals = list[float]  # requests, prompt tokens, answer tokens


def read_workload(path: Path, block_tokens: int) -> "TraceWorkload":
    """Raises InvalidTraceError."""
    if path.suffix == ".csv":
        return _of_loads(read_loads(path))
    return _of_requests(read_requests(path, block_tokens))


@dataclass(frozen=True)
class TraceWorkload:
    """sizes: (prompt, answer) of requests by their number; requests: single ones with hash ids.

    totals: of each window, with its seconds
    """

    sizes: Sequence[tuple[Sizes, float]]
    totals: Sequence[tuple[float, _Totals]]
    trace: LoadTrace | None = None

    @cached_property
    def num_requests(self) -> float:
        return sum(number for _, number in self.sizes)

    @property
    def seconds(self) -> float:
        return sum(seconds for seconds, _ in self.totals)

    @property
    def window_seconds(self) -> float:
        return max(seconds for seconds, _ in self.totals)

    @cached_property
    def input_tokens(self) -> float:
        return sum(number * sizes[0] for sizes, number in self.sizes) / self.num_requests

    @cached_property
    def output_tokens(self) -> float:
        return sum(number * sizes[1] for sizes, number in self.sizes) / self.num_requests

    @property
    def longest(self) -> Sizes:
        return max((sizes for sizes, _ in self.sizes), key=sum)

    def percentile(self, place: int, percentile: float) -> int:
        """Tokens of prompts (0) or answers (1)."""
        return at_percentile(sorted((sizes[place], n) for sizes, n in self.sizes), percentile)

    @cached_property
    def lengths(self) -> LengthDistribution:
        by_tokens = sorted((sizes[0], n * sizes[0]) for sizes, n in self.sizes)
        return LengthDistribution(
            self._prompts,
            (round(self._by_time(0)), max(2, round(self._by_time(1)))),
            sum(self.longest),
            at_percentile(by_tokens, _SHORT_PERCENTILE),
        )

    def _by_time(self, place: int) -> float:
        """Mean of a stream that runs at any time, so each counts by its answer's length."""
        weights = [(sizes[place], n * sizes[1]) for sizes, n in self.sizes]
        return sum(tokens * weight for tokens, weight in weights) / sum(w for _, w in weights)

    def demand(self, percentile: float) -> OfferedLoad:
        windows = [
            LoadWindow(
                seconds,
                requests / seconds,
                prompts / seconds / self.input_tokens,
                answers / seconds / self.output_tokens,
            )
            for seconds, (requests, prompts, answers) in self.totals
        ]
        return OfferedLoad(windows, percentile)

    def shared_ratio(self, kv_tokens: int | None = None) -> float:
        """Part of all prompt tokens that a cache has.  kv_tokens: of a worker, None = endless"""
        if self.trace is None:
            return 0.0
        cached = sum(cached_tokens(self.trace, _cache_tokens(kv_tokens)))
        return cached / (self.input_tokens * self.num_requests)

    def _prompts(self, kv_tokens: int) -> Sequence[Prompt]:
        if self.trace is None:
            return self._plain_prompts
        cached = cached_tokens(self.trace, _cache_tokens(kv_tokens))
        numbers = Counter(
            (each.input_tokens, of_each)
            for each, of_each in zip(self.trace.requests, cached, strict=True)
        )
        return _ordered(numbers.items(), self.num_requests)

    @cached_property
    def _plain_prompts(self) -> Sequence[Prompt]:
        numbers = defaultdict[Sizes, float](float)
        for sizes, number in self.sizes:
            numbers[sizes[0], 0] += number
        return _ordered(numbers.items(), self.num_requests)


def _cache_tokens(kv_tokens: int | None) -> float:
    return math.inf if kv_tokens is None else CACHE_SHARE * kv_tokens


def _ordered(numbers: Iterable[tuple[Sizes, float]], total: float) -> list[Prompt]:
    found = [Prompt(tokens, cached, number / total) for (tokens, cached), number in numbers]
    return sorted(found, key=lambda each: each.computed)


def cached_tokens(trace: LoadTrace, capacity_tokens: float) -> Iterator[int]:
    """Tokens of each prompt's start that a cache of the blocks last used still has.

    All requests meet one cache, as routing by prefixes would have it; one token is left to compute.
    """
    held: OrderedDict[int, None] = OrderedDict()
    names: dict[tuple[int, int], int] = {}  # of blocks, by the block before them and their id
    capacity = capacity_tokens / max(1, trace.block_tokens)
    for request in trace.requests:
        chain = [0]
        for block in request.hash_ids:
            chain.append(names.setdefault((chain[-1], block), len(names) + 1))
        hits = next((n for n, name in enumerate(chain[1:]) if name not in held), len(chain) - 1)
        for name in reversed(chain[1:]):  # the end of a prompt goes first, as in engines
            held[name] = None
            held.move_to_end(name)
        while len(held) > capacity:
            held.popitem(last=False)
        yield min(hits * trace.block_tokens, request.input_tokens - 1)


def _of_loads(intervals: Sequence[LoadInterval]) -> TraceWorkload:
    numbers: dict[Sizes, float] = {}
    for each in intervals:
        if each.num_requests > 0.0:
            sizes = _sizes(each)
            numbers[sizes] = numbers.get(sizes, 0.0) + each.num_requests
    if not numbers:
        fix = "raise requests_per_second, or the time between the rows"
        raise InvalidTraceError([Fault("", "has no request", fix)])
    width = _window(intervals[-1].end)
    totals: list[tuple[float, _Totals]] = []
    begin, held = 0.0, [0.0, 0.0, 0.0]
    for each in intervals:
        prompt, answer = _sizes(each)
        number = each.num_requests
        held = [held[0] + number, held[1] + number * prompt, held[2] + number * answer]
        if each.end - begin >= width or each is intervals[-1]:
            totals.append((each.end - begin, held))
            begin, held = each.end, [0.0, 0.0, 0.0]
    return TraceWorkload(list(numbers.items()), totals)


def _sizes(interval: LoadInterval) -> Sizes:
    return max(1, round(interval.input_tokens)), max(1, round(interval.output_tokens))


def _window(seconds: float) -> float:
    return max(_WINDOW_SECONDS, seconds / _MAX_WINDOWS)


def _of_requests(trace: LoadTrace) -> TraceWorkload:
    if not trace.seconds > 0.0:
        reason = "has all requests at one time, so it has no rate"
        fix = "give requests over a minute or more, or --input and --output in place of it"
        raise InvalidTraceError([Fault("timestamp", reason, fix)])
    count = max(1, int(trace.seconds / _window(trace.seconds)))
    width = trace.seconds / count
    totals: list[_Totals] = [[0.0, 0.0, 0.0] for _ in range(count)]
    numbers: Counter[Sizes] = Counter()
    for each in trace.requests:
        numbers[each.input_tokens, each.output_tokens] += 1
        held = totals[min(count - 1, int(each.seconds / width))]
        _add(held, each)
    return TraceWorkload(
        list(numbers.items()),
        [(width, each) for each in totals],
        trace if trace.block_tokens else None,
    )


def _add(totals: _Totals, request: TraceRequest) -> None:
    totals[0] += 1
    totals[1] += request.input_tokens
    totals[2] += request.output_tokens
