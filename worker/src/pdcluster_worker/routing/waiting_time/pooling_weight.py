"""Weight of the answers of all groups in the distribution of one group.

Where the groups' means differ by no more than chance, all answers may as well be of one group;
where they differ by more, another group's answers say little.  So the weight, in completions of the
group's own, is the variance of answers within groups over that of the groups' true means (method of
moments of a one-way analysis of variance): an answer of the group's own counts as much as all
others together at that ratio.  To the latter variance its standard error is added, since a few
groups of a few answers look alike by chance.
"""

from collections.abc import Iterable, Sequence
from math import sqrt

LEAST, MOST = 0.1, 200.0
"""Bounds of the weight: a group without completions has the others', and its own outweigh them in
the end.
"""

UNKNOWN = 1.0
"""The weight until two groups can be compared."""


def shared_weight(groups: Iterable[Sequence[int]]) -> float:
    """The weight of all answers together, in completions; UNKNOWN where groups cannot be compared.

    groups: lengths of answers by group; those with one alone say nothing.

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
