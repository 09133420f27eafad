"""Fields of an answer about its prompts and single tokens: vLLM's ids and log probabilities of
prompts, and OpenAI's `echo`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdcluster_worker.messages.requests import PromptLogprob
from pdcluster_worker.server.openai import logprobs
from pdcluster_worker.server.openai.logprobs import TokenNames
from pdcluster_worker.server.openai.protocol import CompletionLogprobs, PromptTokenLogprob
from pdcluster_worker.server.schemas.requests import Generate
from pdcluster_worker.server.text.detokenizer import Detokenizer
from pdcluster_worker.server.text.events import Delta
from pdcluster_worker.server.text.tokenizer import Tokenizer


@dataclass(slots=True)
class ResponseExtras:
    """names:           of tokens.
    prompts:         their tokens.
    n:               choices of each.
    has_token_ids:   whether ids are shown.
    prompt_logprobs: most likely tokens shown at each position of a prompt; None = the field is not
                     there.
    echo:            texts of the prompts, which begin their choices' texts; none where they do not.
    echo_logprobs:   most likely tokens of the echo's positions.
    hides_output:    nothing that was generated is shown, as for max_tokens 0.
    """

    names: TokenNames
    prompts: Sequence[Sequence[int]] = ()
    n: int = 1
    has_token_ids: bool = False
    prompt_logprobs: int | None = None
    echo: Sequence[str] = ()
    echo_logprobs: int = 0
    hides_output: bool = False
    _figures: dict[int, list[PromptLogprob]] = field(default_factory=dict)

    def note(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            if delta.made and delta.made[0].prompt_logprobs:
                self._figures[self._prompt(delta.index)] = delta.made[0].prompt_logprobs

    def token_ids(self, deltas: Sequence[Delta]) -> list[int] | None:
        if not self.has_token_ids:
            return None
        return (
            []
            if self.hides_output
            else [token.token_id for delta in deltas for token in delta.made]
        )

    def prompt_token_ids(self, index: int) -> list[int] | None:
        return list(self.prompts[self._prompt(index)]) if self.has_token_ids else None

    def of_prompt(self, index: int) -> list[dict[str, PromptTokenLogprob] | None] | None:
        if self.prompt_logprobs is None:
            return None
        prompt = self._prompt(index)
        return logprobs.for_prompt(
            self.prompts[prompt], self._figures.get(prompt, []), self.prompt_logprobs, self.names
        )

    def text_before(self, index: int) -> str:
        return self.echo[self._prompt(index)] if self.echo else ""

    def logprobs_before(self, index: int) -> list[CompletionLogprobs]:
        if not self.echo:
            return []
        prompt = self._prompt(index)
        ids = self.prompts[prompt]
        offsets = text_offsets(ids, self.echo[prompt], self.names.tokenizer)
        return [
            logprobs.echoed(
                ids, offsets, self._figures.get(prompt, []), self.echo_logprobs, self.names
            )
        ]

    def _prompt(self, index: int) -> int:
        return index // self.n


def extras_of(
    request: Generate, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], **echo: Any
) -> ResponseExtras:
    return ResponseExtras(
        TokenNames(tokenizer, as_ids=bool(request.return_tokens_as_token_ids)),
        prompts,
        request.n or 1,
        has_token_ids=bool(request.return_token_ids),
        prompt_logprobs=request.prompt_logprobs,
        **echo,
    )


def text_offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Offset at which each token begins in the text of its prompt; a control token that the text
    does not have takes no room.
    """
    offsets: list[int] = []
    detokenizer = Detokenizer()
    place = 0
    for token_id in token_ids:
        offsets.append(min(place, len(text)))
        piece = detokenizer.feed(tokenizer.piece(token_id))
        if place == 0 and piece.startswith(" ") and not text.startswith(" "):
            piece = piece[1:]  # SentencePiece puts a space before a text
        if not tokenizer.is_special(token_id) or text.startswith(piece, place):
            place += len(piece)
    return offsets
