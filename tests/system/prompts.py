"""Random prompts, the same in every run, that share no prefix with those of another test."""

from random import Random

from tests.make_tiny_model import SPECIAL_TOKENS, VOCAB_SIZE


class Prompts:
    """A source of prompts; `name` is its seed."""

    def __init__(self, name: str) -> None:
        self._random = Random(name)

    def __call__(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(len(SPECIAL_TOKENS), VOCAB_SIZE) for _ in range(num_tokens)]
