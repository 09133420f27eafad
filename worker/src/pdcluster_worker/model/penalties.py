"""Token counts of running requests, and the logits that penalties, bans and biases leave.

Counts are kept per request and moved forward by the tokens that are new since
the last step; they are rebuilt from `request.tokens` whenever they do not fit
them, so dropping them at any time is safe.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from pdcluster_worker.engine.messages import Sampling
from pdcluster_worker.engine.request import Request


@dataclass(slots=True)
class TokenCounts:
    """What one request has seen and said.

    seen: [vocab_size] bool, tokens of prompt or output.  said: [vocab_size] float, times in the output.
    num_counted: tokens of the request that are in them; last: the last of these.
    """

    seen: Tensor
    said: Tensor
    num_counted: int = 0
    last: int = -1

    @classmethod
    def empty(cls, vocab_size: int) -> "TokenCounts":
        """Nothing counted."""
        return cls(torch.zeros(vocab_size, dtype=torch.bool), torch.zeros(vocab_size))

    def follows(self, request: Request) -> bool:
        """Whether the request's tokens begin with what is counted, as far as its length and last token tell."""
        if self.num_counted == 0:
            return True
        return self.num_counted <= request.num_tokens and request.tokens[self.num_counted - 1] == self.last

    def extend(self, request: Request) -> None:
        """Count the request's tokens from `num_counted` on."""
        fresh = torch.tensor(request.tokens[self.num_counted :], dtype=torch.long)
        output = torch.tensor(request.tokens[max(self.num_counted, request.num_prompt_tokens) :], dtype=torch.long)
        self.seen[fresh] = True
        self.said.index_add_(0, output, torch.ones(len(output)))
        self.num_counted, self.last = request.num_tokens, request.tokens[-1]


class PenaltyState:
    """Counts of the requests that use penalties, by request id."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts: dict[str, TokenCounts] = {}

    def counts(self, request: Request) -> TokenCounts:
        """Up-to-date counts of this request."""
        counts = self._counts.get(request.request_id)
        if counts is None or not counts.follows(request):
            counts = self._counts[request.request_id] = TokenCounts.empty(self._vocab_size)
        counts.extend(request)
        return counts

    def forget(self, request_id: str) -> None:
        """Drop the request's counts; unknown ids are a no-op."""
        self._counts.pop(request_id, None)


def is_plain(request: Request) -> bool:
    """Whether its logits are used as the model made them."""
    return not (uses_penalties(request.sampling) or request.sampling.logit_bias or banned_tokens(request))


def uses_penalties(sampling: Sampling) -> bool:
    """Whether token counts matter."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty) or sampling.repetition_penalty != 1.0


def banned_tokens(request: Request) -> list[int]:
    """Tokens that would end the request before min_tokens is reached [V11]."""
    sampling = request.sampling
    if request.num_output_tokens >= sampling.min_tokens:
        return []
    return [*sampling.eos_token_ids, *sampling.stop_token_ids]


def adjust(logits: Tensor, request: Request, state: PenaltyState) -> Tensor:
    """A copy of one row with penalties, then bias, then bans applied.

    logits: [vocab_size] float32.  Repetition divides positive and multiplies
    negative logits of every token seen (CTRL); frequency subtracts for each time
    a token was said and presence once (OpenAI: output only).
    Raises ValueError for a token id outside the vocabulary.
    """
    sampling = request.sampling
    row = logits.clone()
    if uses_penalties(sampling):
        counts = state.counts(request)
        factor = sampling.repetition_penalty
        row = torch.where(counts.seen, torch.where(row > 0, row / factor, row * factor), row)
        row -= sampling.frequency_penalty * counts.said + sampling.presence_penalty * (counts.said > 0)
    for token_id, bias in sampling.logit_bias.items():
        row[_checked(token_id, len(row), "logit_bias")] += bias
    for token_id in banned_tokens(request):
        row[_checked(token_id, len(row), "stop_token_ids")] = float("-inf")
    return row


def _checked(token_id: int, vocab_size: int, field: str) -> int:
    if not 0 <= token_id < vocab_size:
        raise ValueError(f"{field} names token {token_id}, but token ids are 0 to {vocab_size - 1}")
    return token_id
