"""Two greedy answers to one prompt: the same, but for a near tie.

Pure.  Where the two best logits of the reference are about equal, another order of sums may turn
them (promise 1 in docs/architecture.md), and the answers have nothing in common after that place.
"""

from collections.abc import Sequence

from pdcluster_worker.messages.requests import Token

TIES = {"float32": 0.01}
"""Largest difference of two log probabilities that counts as a near tie, by dtype: ten times the
1e-3 of float32 logits that promise 1 allows, since prefill and decode may be on devices of two
kinds.
"""

_COARSE_TIE = 0.5
"""The same of any other dtype: some units in the last of the 8 bits of a logit in bfloat16."""


def tie_of(dtype: str) -> float:
    """The largest difference that counts as a near tie."""
    return TIES.get(dtype, _COARSE_TIE)


def first_difference(
    reference: Sequence[Token], other: Sequence[Token], tie: float
) -> tuple[int, bool]:
    """(tokens that are equal from the first one on, whether the next one is a true difference).

    The tokens of the reference carry `top_logprobs`.

    >>> a = Token("r", 1, logprob=-0.1, top_logprobs=[(1, -0.1), (2, -0.4)])
    >>> first_difference([a, a], [a, a], 0.1), first_difference([a, a], [a, Token("r", 2)], 0.1)
    ((2, False), (1, True))
    >>> first_difference([a, a], [a, Token("r", 2)], 0.5)
    (1, False)
    """
    for index, (expected, found) in enumerate(zip(reference, other, strict=False)):
        if expected.token_id != found.token_id:
            return index, not _is_tie(expected, found.token_id, tie)
    num_equal = min(len(reference), len(other))
    return num_equal, len(reference) != len(other)


def _is_tie(expected: Token, token_id: int, tie: float) -> bool:
    others = dict(expected.top_logprobs)
    if expected.logprob is None or token_id not in others:
        return False
    return expected.logprob - others[token_id] <= tie
