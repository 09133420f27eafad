"""The requests of a load: random token ids, or prompts of a file, all drawn from one seed."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pdcluster_api.errors import InvalidTraceError
from pdcluster_schema.faults import Fault
from pdctl.bench.load import BenchRequest

Name = Literal["random", "custom", "sharegpt"]
FIRST_PLAIN_TOKEN = 256
"""Special tokens and single bytes stand below it in common vocabularies."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of random requests, in tokens.

    prefix_len:  tokens that all prompts share, on top of input_len
    range_ratio: lengths are uniform in length x (1 - r) to length x (1 + r)
    """

    input_len: int
    output_len: int
    prefix_len: int = 0
    range_ratio: float = 0.0

    @property
    def longest(self) -> int:
        return self.prefix_len + sum(
            _bounds(length, self.range_ratio)[1] for length in (self.input_len, self.output_len)
        )


@dataclass(frozen=True, slots=True)
class DatasetSampling:
    temperature: float = 0.0
    ignore_eos: bool = True


def random_requests(
    count: int, lengths: Lengths, vocab_size: int, seed: str, sampling: DatasetSampling
) -> list[BenchRequest]:
    source = random.Random(f"random dataset {seed}")

    def tokens(length: int) -> list[int]:
        return [source.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(length)]

    def drawn(length: int) -> int:
        return source.randint(*_bounds(length, lengths.range_ratio))

    prefix = tokens(lengths.prefix_len)
    return [
        BenchRequest(
            prefix + tokens(drawn(lengths.input_len)),
            drawn(lengths.output_len),
            sampling.temperature,
            sampling.ignore_eos,
        )
        for _ in range(count)
    ]


def _bounds(length: int, ratio: float) -> tuple[int, int]:
    return max(1, int(length * (1 - ratio))), max(1, int(length * (1 + ratio)))


def file_requests(
    path: Path, name: Name, count: int, output_len: int, sampling: DatasetSampling
) -> list[BenchRequest]:
    """The first `count` prompts of a file, repeated where it has fewer.

    custom:   JSON lines, each `{"prompt": TEXT}` with an optional `"output_tokens": N`
    sharegpt: a JSON list of `{"conversations": [{"value": TEXT}, ...]}`; the first text is sent
    Raises InvalidTraceError with the line of each fault before anything is sent.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = (e.strerror or str(e)) if isinstance(e, OSError) else "it is not UTF-8 text"
        fix = "give a file of prompts with --dataset-path"
        raise InvalidTraceError([Fault("", f"cannot be read: {reason}", fix)]) from e
    reader = _custom if name == "custom" else _sharegpt
    prompts = list(reader(text, output_len))
    if not prompts:
        raise InvalidTraceError([Fault("", "has no prompt", _FIXES[name])])
    chosen = [prompts[index % len(prompts)] for index in range(count)]
    return [
        BenchRequest(prompt, num_tokens, sampling.temperature, sampling.ignore_eos)
        for prompt, num_tokens in chosen
    ]


_FIXES = {
    "custom": 'write a line {"prompt": "..."} for each',
    "sharegpt": 'write a list of {"conversations": [{"from": "human", "value": "..."}]}',
}


def _custom(text: str, output_len: int) -> Iterator[tuple[str, int]]:
    faults = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        row = _json(line)
        prompt = row.get("prompt") if isinstance(row, dict) else None
        num_tokens = row.get("output_tokens", output_len) if isinstance(row, dict) else None
        if not isinstance(prompt, str) or not prompt:
            faults.append(Fault(f"line {number}", "has no text `prompt`", _FIXES["custom"]))
        elif type(num_tokens) is not int or num_tokens < 1:
            reason = f"output_tokens is {num_tokens!r}"
            faults.append(Fault(f"line {number}", reason, "give a whole number from 1"))
        else:
            yield prompt, num_tokens
    if faults:
        raise InvalidTraceError(faults)


def _sharegpt(text: str, output_len: int) -> Iterator[tuple[str, int]]:
    rows = _json(text)
    if not isinstance(rows, list):
        raise InvalidTraceError([Fault("", "is no JSON list", _FIXES["sharegpt"])])
    for row in rows:
        turns = row.get("conversations") if isinstance(row, dict) else None
        first = turns[0].get("value") if turns and isinstance(turns[0], dict) else None
        if isinstance(first, str) and first:  # public files have a few empty conversations
            yield first, output_len


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
