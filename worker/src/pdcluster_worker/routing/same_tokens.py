"""Compare two greedy answers to one prompt, allowing for near ties.

Where the two best logits are about equal, another order of sums may swap them (promise 1).
"""

from collections.abc import Sequence

from pdcluster_worker.messages.requests import Token

# largest difference of log probabilities that is a near tie: ten times the 1e-3 of promise 1, since
# prefill and decode may be on different kinds of devices
TIES = {"float32": 0.01}

_COARSE_TIE = 0.5  # some units in the last of the 8 bits of a bfloat16 logit


def tie_of(dtype: str) -> float:
    return TIES.get(dtype, _COARSE_TIE)


def first_difference(
    reference: Sequence[Token], other: Sequence[Token], tie: float
) -> tuple[int, bool]:
    """(number of equal leading tokens, whether the next one is a real difference).

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
