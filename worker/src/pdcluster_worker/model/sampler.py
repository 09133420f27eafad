"""Chooses one token a row of logits, the same one whatever else is in the batch.

Order: penalties, bias and bans (`model.penalties`), temperature, min_p, top_k,
top_p, then a draw by inverse CDF from a counter-based number.  Every row that
is not plain greedy is worked on alone, so its arithmetic never depends on its
neighbours.  Log probabilities are those of the model, before any of this.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdcluster_worker.engine.messages import Sampling
from pdcluster_worker.engine.ports import Sample
from pdcluster_worker.engine.request import Request
from pdcluster_worker.model.penalties import PenaltyState, adjust, is_plain
from pdcluster_worker.model.randomness import uniform

GREEDY_BELOW = 1e-5
"""Temperatures below this are 0: dividing by them overflows and changes nothing (vLLM's limit)."""

NUCLEUS_GUESSES = (256, 4096)
"""How many of the likeliest tokens are sorted for top_p before the whole vocabulary is: sorting it all costs 4 ms a row."""


class Sampler:
    """Samples rows for requests; keeps token counts of those with penalties."""

    def __init__(self, vocab_size: int) -> None:
        self._penalties = PenaltyState(vocab_size)

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[Sample]:
        """One Sample a row.

        logits: [len(requests), vocab_size] float32, not modified.
        Raises ValueError naming the request whose row is not finite or whose token ids do not exist.
        """
        best = logits.max(dim=1)
        _check_finite(best.values, requests)
        greedy = best.indices.tolist()
        chosen = [self._choose(logits[row], request, greedy[row]) for row, request in enumerate(requests)]
        return [_describe(logits[row], token_id, requests[row].sampling.logprobs) for row, token_id in enumerate(chosen)]

    def forget(self, request_id: str) -> None:
        """Drop what is kept for this request; unknown ids are a no-op."""
        self._penalties.forget(request_id)

    def _choose(self, logits: Tensor, request: Request, greedy: int) -> int:
        sampling = request.sampling
        plain = is_plain(request)
        if plain and sampling.temperature < GREEDY_BELOW:
            return greedy
        row = logits if plain else adjust(logits, request, self._penalties)
        if not bool(row.max() > float("-inf")):
            raise ValueError(f"request {request.request_id}: no token is left to choose from: lower min_tokens")
        if sampling.temperature < GREEDY_BELOW:
            return int(row.argmax())
        return draw(filter_probabilities(row, sampling), uniform(sampling.seed, request.num_tokens))


def filter_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """What temperature, min_p, top_k and top_p leave of one row, not renormalised: excluded tokens have exactly 0.

    logits: [vocab_size]; returns [vocab_size] float64.
    Tokens as likely as the last one kept are kept too: which of equals would
    stay must not depend on how they were sorted.
    """
    probabilities = torch.softmax(logits.double() / sampling.temperature, dim=0)
    if sampling.min_p > 0.0:
        probabilities = _keep(probabilities, probabilities.max() * sampling.min_p)
    if 0 < sampling.top_k < len(probabilities):
        probabilities = _keep(probabilities, torch.topk(probabilities, sampling.top_k).values[-1])
    if sampling.top_p < 1.0:
        probabilities = _keep(probabilities, _nucleus_threshold(probabilities, sampling.top_p))
    return probabilities


def draw(probabilities: Tensor, u: float) -> int:
    """The token at the share `u` of the total, counting tokens in vocabulary order.

    probabilities: [vocab_size] float64, not all zero; a token of probability 0 is never drawn.
    """
    cumulative = probabilities.cumsum(0)
    index = int(torch.searchsorted(cumulative, cumulative[-1] * u, right=True))
    # Rounding can put the share at the very end, past the last possible token.
    return index if index < len(probabilities) else int(probabilities.nonzero()[-1])


def _keep(probabilities: Tensor, threshold: Tensor) -> Tensor:
    return torch.where(probabilities >= threshold, probabilities, 0.0)


def _nucleus_threshold(probabilities: Tensor, top_p: float) -> Tensor:
    """The least probability in the smallest set of most likely tokens that holds `top_p` of the total."""
    wanted = probabilities.sum() * top_p
    for size in (*NUCLEUS_GUESSES, len(probabilities)):
        likeliest = torch.topk(probabilities, min(size, len(probabilities))).values
        reached = likeliest.cumsum(0) >= wanted
        if bool(reached[-1]):
            return likeliest[int(reached.int().argmax())]
    return likeliest[-1]  # rounding: the whole vocabulary sums to a little less


def _check_finite(best: Tensor, requests: Sequence[Request]) -> None:
    finite = torch.isfinite(best)  # max() hands NaN and +inf on, and is -inf only when every token is
    if not bool(finite.all()):
        bad = requests[int((~finite).int().argmax())]
        raise ValueError(f"request {bad.request_id}: the model's logits are not finite after {bad.num_tokens} tokens")


def _describe(logits: Tensor, token_id: int, num_logprobs: int | None) -> Sample:
    if num_logprobs is None:
        return Sample(token_id)
    logprobs = torch.log_softmax(logits, dim=0)
    top = torch.topk(logprobs, min(num_logprobs, len(logprobs)))
    return Sample(token_id, float(logprobs[token_id]), tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
