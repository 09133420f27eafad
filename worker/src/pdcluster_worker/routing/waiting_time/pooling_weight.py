"""Weight of all groups' answers in the length distribution of one group.

If group means differ by no more than noise, pool the groups (one-way ANOVA, method of moments).
"""

from collections.abc import Iterable, Sequence
from math import sqrt

LEAST, MOST = 0.1, 200.0  # bounds of the weight

UNKNOWN = 1.0  # until two groups can be compared


def shared_weight(groups: Iterable[Sequence[int]]) -> float:
    """groups: lengths of answers by group; UNKNOWN with fewer than two groups of two answers.

    >>> [round(shared_weight(groups), 1) for groups in ([[1, 99, 50], [3, 97, 51]], [[10, 11, 12],
    ...     [90, 91, 92]], [[5, 6]])]
    [2.1, 0.1, 1.0]
    """
    known = [lengths for lengths in groups if len(lengths) > 1]
    if len(known) < 2:
        return UNKNOWN
    sizes, means = (
        [len(lengths) for lengths in known],
        [sum(lengths) / len(lengths) for lengths in known],
    )
    total, num_free = sum(sizes), len(known) - 1
    within = sum(
        (length - mean) ** 2
        for lengths, mean in zip(known, means, strict=True)
        for length in lengths
    ) / (total - len(known))
    grand = sum(size * mean for size, mean in zip(sizes, means, strict=True)) / total
    between = (
        sum(size * (mean - grand) ** 2 for size, mean in zip(sizes, means, strict=True)) / num_free
    )
    typical_size = (total - sum(size * size for size in sizes) / total) / num_free
    doubt = within / typical_size * sqrt(2 / num_free)
    of_means = max(0.0, between - within) / typical_size + doubt
    return MOST if of_means <= 0 else min(MOST, max(LEAST, within / of_means))
