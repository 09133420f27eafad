"""Texts cut into deltas, and the calls that were read of them."""

import json
from collections.abc import Iterable
from itertools import pairwise

from pdcluster_worker.server.text.events import WholeAnswer


def cut(text: str, places: Iterable[int]) -> list[str]:
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in pairwise(bounds)]


def called(answer: WholeAnswer) -> tuple[tuple[str, object], ...]:
    return tuple((call.name, json.loads(call.arguments)) for call in answer.tool_calls)
