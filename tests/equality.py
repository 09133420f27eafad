"""The first promise of docs/architecture.md as a check: the same tokens, but for a first difference
at a near tie.

In fp32 two correct ways to compute the same logits differ by about 1e-5, so a
greedy answer may turn where the reference's two best logits are closer than
NEAR_TIE; what follows such a place is another answer and is not compared.
"""

from collections.abc import Sequence

NEAR_TIE = 1e-3


def assert_same_tokens(
    reference_logit_gaps: Sequence[float], expected: Sequence[int], actual: Sequence[int]
) -> bool:
    """Fail unless `actual` equals `expected` token for token, or first differs at a near tie.

    reference_logit_gaps: best minus second best logit of the reference at each expected token.
    Returns whether a difference was excused, for the caller to count and report.
    """
    assert len(reference_logit_gaps) == len(expected), (
        f"{len(reference_logit_gaps)} gaps for {len(expected)} tokens"
    )
    for place, (want, got) in enumerate(zip(expected, actual, strict=False)):
        if want != got:
            gap = reference_logit_gaps[place]
            assert gap < NEAR_TIE, (
                f"token {place} is {got}, expected {want}; the reference's gap there is {gap:.4g}, "
                "no near tie"
            )
            return True
    assert len(actual) == len(expected), f"{len(actual)} tokens, expected {len(expected)}"
    return False
