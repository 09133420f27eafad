"""Hashes of blocks, as every worker of a revision computes them."""

import random
from typing import Any, ClassVar

import pytest

from pdcluster_worker.messages.block_hash import block_hashes, next_hash, request_hashes
from pdcluster_worker.messages.requests import Image, RequestSpec, SamplingParams


def test_chains_of_two_salts_share_no_block():
    tokens = list(range(8))
    chains = [block_hashes(tokens, 4, salt) for salt in (b"", b"a" * 32, b"b" * 32)]
    assert chains[1] == block_hashes(tokens, 4, b"a" * 32)
    assert len({block_hash for chain in chains for block_hash in chain}) == 6


class CountedImage(Image):
    """Counts how often its place is asked for."""

    num_looks: ClassVar[int] = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "offset":
            CountedImage.num_looks += 1
        return super().__getattribute__(name)


def spec_with(num_tokens: int, images: list[Image]) -> RequestSpec:
    return RequestSpec("r", list(range(num_tokens)), SamplingParams(8, seed=0), images=images)


@pytest.mark.parametrize("seed", range(20))
def test_each_block_has_the_images_that_are_in_it(seed: int) -> None:
    chance, place, images = random.Random(seed), 0, list[Image]()
    while (place := place + chance.choice([0, 0, 1, 5, 40])) < 180:
        length = chance.choice([1, 2, 4, 7, 33])
        images.append(Image(place, length, f"{chance.random()}", ""))
        place += length
    expected: list[bytes] = []
    for start in range(0, 200, 4):
        covered = [
            (image.digest, image.offset - start)
            for image in images
            if {*range(image.offset, image.offset + image.length)} & {*range(start, start + 4)}
        ]
        parent = expected[-1] if expected else None
        expected.append(next_hash(parent, range(start, start + 4), b"", covered))

    assert request_hashes(spec_with(203, images), 4) == expected


def test_many_images_are_walked_once() -> None:
    images = [CountedImage(20 * number, 10, f"{number}", "") for number in range(200)]
    request_hashes(spec_with(4000, [*images]), 16)

    assert CountedImage.num_looks < 10 * (200 + 4000 // 16)
