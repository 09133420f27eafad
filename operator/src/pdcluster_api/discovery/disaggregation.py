"""The disaggregation part of a worker record, read with care: its worker may be newer or older."""

import math
from collections.abc import Mapping
from typing import Any

from pdcluster_api.plan.observed.state import WorkerDisaggregation
from pdcluster_schema.text import shortened

_MAX_PEERS = 8
_MAX_NAME = 63
_MAX_REASON = 400
_MOST = 10**15
"""Largest count or rate: what is larger is no number that a worker means."""


def read_disaggregation(content: Mapping[str, Any]) -> WorkerDisaggregation | None:
    """Parts of the section; None where one cannot be read, so that the rest of it counts all
    the same.
    """
    found = content.get("disaggregation")
    if not isinstance(found, Mapping):
        return None
    try:
        ratio = found.get("remote_ratio")
        return WorkerDisaggregation(
            transport=str(found["transport"])[:_MAX_NAME],
            refused=tuple(
                (str(each["pod"])[:_MAX_NAME], shortened(str(each["reason"]), _MAX_REASON))
                for each in list(found.get("refused", ()))[:_MAX_PEERS]
            ),
            num_refused=_count(found.get("num_refused", 0)),
            long_prompts=_count(found.get("long_prompts", 0)),
            remote_ratio=None if ratio is None else _ratio(ratio),
            bytes_per_second=_count(found.get("bytes_per_second", 0)),
            transport_note=shortened(str(found.get("transport_note", "")), _MAX_REASON),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _count(value: Any) -> int:
    number = int(value)
    if not 0 <= number <= _MOST:
        raise ValueError(f"{number} is no count")
    return number


def _ratio(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or not 0 <= number <= 1:
        raise ValueError(f"{number} is no share")
    return number
