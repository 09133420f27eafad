"""Distribution of answer lengths from finished and running answers (Kaplan-Meier)."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

BEYOND = 0.5  # share of its length that the longest answer so far is taken to go on for


@dataclass(frozen=True, slots=True)
class Survival:
    """S(t): the share of answers longer than t tokens, a step function."""

    ends: tuple[int, ...]  # lengths at which it falls, ascending
    share: tuple[float, ...]  # S from there on; the last is 0
    beyond: tuple[float, ...]  # mean tokens by which answers exceed ends[i], times share[i]

    @classmethod
    def of(
        cls, completed: Iterable[tuple[int, float]], running: Iterable[tuple[int, float]] = ()
    ) -> "Survival":
        """From (tokens, weight) pairs; at least one completed, else ValueError."""
        # tokens: weight that ended there, weight that left there
        events: dict[int, list[float]] = {}
        for index, pairs in enumerate((completed, running)):
            for tokens, weight in pairs:
                event = events.setdefault(tokens, [0.0, 0.0])
                event[0] += 0.0 if index else weight
                event[1] += weight
        at_risk = sum(weight for _, weight in events.values())
        ends, share, left = [], [], 1.0
        for tokens in sorted(events):
            ended, gone = events[tokens]
            if ended:
                left *= max(0.0, 1.0 - ended / at_risk)
                ends.append(tokens)
                share.append(left)
            at_risk -= gone
        if not ends:
            raise ValueError("no answer has ended: ask with at least one completed length")
        share[-1] = 0.0
        return cls(tuple(ends), tuple(share), tuple(_areas(ends, share)))

    def mean_beyond(self, tokens: int) -> float:
        """Mean tokens that an answer of already `tokens` still has; at least 1."""
        index = bisect_right(self.ends, tokens)
        if index == len(self.ends):
            return max(1.0, BEYOND * tokens)
        left = self.share[index - 1] if index else 1.0
        area = left * (self.ends[index] - tokens) + self.beyond[index]
        return max(1.0, area / left)

    @property
    def mean(self) -> float:
        return self.mean_beyond(0)

    def quantile_beyond(self, tokens: int, rank: float) -> float:
        """The same at a rank in [0, 1) of the answers so long; at least 1."""
        index = bisect_right(self.ends, tokens)
        if index == len(self.ends):
            return max(1.0, BEYOND * tokens)
        left = self.share[index - 1] if index else 1.0
        while self.share[index] > left * (1.0 - rank):
            index += 1
        return max(1.0, float(self.ends[index] - tokens))


def _areas(ends: list[int], share: list[float]) -> list[float]:
    areas = [0.0]
    for index in range(len(ends) - 1, 0, -1):
        areas.append(areas[-1] + share[index - 1] * (ends[index] - ends[index - 1]))
    return areas[::-1]
