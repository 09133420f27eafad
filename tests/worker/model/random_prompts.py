"""Prompts of random tokens of the tiny models."""

import random


def random_prompt(seed: int, length: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 512) for _ in range(length)]
