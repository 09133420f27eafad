"""Our own estimator, `loadAware`: it plays the queue forward with lengths and speeds as they were measured.

Where RWT has one mean length and one time of a token, this has

    d(b)          seconds of a token in a batch of b, a line fitted online (`step_time`);
    S(t), t > g   how long answers of the group are, given that one already has g tokens (`survival`), running ones
                  counted as censored, with a few pseudo-samples from all groups while the group has few of its own;
    p             prompt tokens a second (`prefill_rate`);

and the completion time is the end of the last request in `drain(lengths, seats, d)`.  For a group the lengths are
drawn SCENARIOS times at spread ranks of S and the median of the ends is taken: the last of several requests ends
later than the mean of each.  docs/waiting-time.md has the formula and when to trust it.
"""

from collections import deque
from collections.abc import Callable, Collection
from statistics import median

from pdcluster_worker.routing.estimator import Completion, Flight, Line
from pdcluster_worker.routing.waiting_time.bounded import Bounded
from pdcluster_worker.routing.waiting_time.drain import drain
from pdcluster_worker.routing.waiting_time.line import ahead_of
from pdcluster_worker.routing.waiting_time.prefill_rate import PrefillRate
from pdcluster_worker.routing.waiting_time.presets import Presets
from pdcluster_worker.routing.waiting_time.rwt import MAX_GROUPS, MIN_SAMPLES
from pdcluster_worker.routing.waiting_time.step_time import StepTime
from pdcluster_worker.routing.waiting_time.survival import Survival

WINDOW = 200
"""Latest lengths that are kept of a group, and of all groups together."""

POOL_SAMPLES = 1.0
"""The weight of all groups together in one group, in completions of its own."""

SCENARIOS = 32
"""Draws of all lengths for the completion time of a group."""

_GOLDEN = 0.6180339887498949  # ranks of neighbours are as far apart as can be


class LoadAware:
    """Estimates by playing the line forward; learns from completions."""

    def __init__(self, presets: Presets) -> None:
        self._preset_tokens = presets.output_tokens
        self._step = StepTime(presets.token_seconds, MIN_SAMPLES)
        self._prefill = PrefillRate(presets.prefill_tokens_per_second)
        self._lengths: Bounded[deque[int]] = Bounded(MAX_GROUPS)
        self._pool: deque[int] = deque(maxlen=WINDOW)

    def observe(self, completion: Completion) -> None:
        """Learn from a completion, short ones too: they are part of the distribution."""
        self._prefill.observe(completion.prompt_tokens, completion.prefill_seconds)
        self._step.observe(completion.decode_seconds, completion.output_tokens, completion.batch)
        lengths = self._lengths.get(completion.group, deque(maxlen=WINDOW))
        lengths.append(completion.output_tokens)
        self._lengths.put(completion.group, lengths)
        self._pool.append(completion.output_tokens)

    def survival(self, group: str, line: Line) -> Survival:
        """The distribution of the lengths of a group's answers."""
        own = self._lengths.get(group, deque())
        completed = [(tokens, 1.0) for tokens in own]
        if self._pool:
            share = POOL_SAMPLES / len(self._pool)
            completed += [(tokens, share) for tokens in self._pool]
        if len(self._pool) < MIN_SAMPLES:
            completed.append((round(self._preset_tokens), float(MIN_SAMPLES - len(self._pool))))
        running = [(f.num_tokens, 1.0) for f in line.flights if f.group == group and f.is_decoding]
        return Survival.of(completed, running)

    def group_seconds(self, members: Collection[Flight], line: Line) -> float | None:
        """Seconds from now until all `members` are complete; line: they and whatever is served beside and before them, in order."""
        if self._step.seconds(1.0) is None or not members:
            return None if members else 0.0
        chosen = {id(flight) for flight in members}
        running = [flight for flight in line.flights if flight.is_decoding]
        waiting = [flight for flight in line.flights if not flight.is_decoding]
        survivals = self._survivals(line, line.flights)
        counted = [index for index, flight in enumerate(running + waiting) if id(flight) in chosen]
        ends = []
        for scenario in range(SCENARIOS):
            lengths = [
                _drawn(flight, survivals[flight.group], (scenario + 0.5) / SCENARIOS + _GOLDEN * index)
                for index, flight in enumerate(running + waiting)
            ]
            spans = drain(lengths[: len(running)], lengths[len(running) :], line.seats, self._seconds)
            ends.append(max(spans[index][1] for index in counted))
        # A prefill holds up its own seat; that it also slows the others down is in their d(b).
        return median(ends) + self._prefill.seconds(sum(flight.prompt_tokens for flight in waiting)) / max(1, line.seats)

    def estimated_ttft_seconds(self, flight: Flight, line: Line) -> float | None:
        """When a seat is free for it, the prefills before it and its own, and a step."""
        played = self._play(flight, line)
        return None if played is None else played[0]

    def estimated_completion_seconds(self, flight: Flight, line: Line) -> float | None:
        """With an answer of its group's mean length."""
        played = self._play(flight, line)
        return None if played is None else played[1]

    def _play(self, flight: Flight, line: Line) -> tuple[float, float] | None:
        """(first token, last token) in seconds from now."""
        step = self._step.seconds(1.0)
        if step is None:
            return None
        ahead = ahead_of(flight, line)
        running = [other for other in line.flights if other.is_decoding]
        survivals = self._survivals(line, [flight, *running, *ahead])
        mean = _mean(survivals)
        spans = drain([mean(f) for f in running], [mean(f) for f in [*ahead, flight]], line.seats, self._seconds)
        start, end = spans[-1]
        before = self._prefill.seconds(sum(other.prompt_tokens for other in ahead))
        # Where seats are free all prompts ahead are computed first; where not, each in a seat of its own and beside others.
        prompts = self._prefill.seconds(flight.prompt_tokens) + (before if start == 0 else before / max(1, line.seats))
        return start + prompts + self._seconds(len(running) + 1), end + prompts

    def _survivals(self, line: Line, flights: Collection[Flight]) -> dict[str, Survival]:
        return {group: self.survival(group, line) for group in {flight.group for flight in flights}}

    def _seconds(self, batch: float) -> float:
        seconds = self._step.seconds(batch)
        assert seconds is not None, "asked for before"
        return seconds


def _mean(survivals: dict[str, Survival]) -> Callable[[Flight], float]:
    def tokens(flight: Flight) -> float:
        left = max(1, flight.max_tokens - flight.num_tokens)
        return min(float(left), survivals[flight.group].mean_beyond(flight.num_tokens))

    return tokens


def _drawn(flight: Flight, survival: Survival, rank: float) -> float:
    left = max(1, flight.max_tokens - flight.num_tokens)
    return min(float(left), survival.quantile_beyond(flight.num_tokens, rank % 1.0))
