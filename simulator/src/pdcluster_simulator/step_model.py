"""Seconds of an engine's steps, measured or computed, and the file that holds them."""

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from pdcluster_api.errors import StartError
from pdcluster_simulator.simulated_step import SimulatedStep

FORMAT = "pdcluster-step-times/1"
NUM_ROWS = 2048  # that are looked up; more are computed

_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e6)]
_Rate = Annotated[float, msgspec.Meta(gt=0.0, le=1e15)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class StepModel(
    msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True, dict=True
):
    """Steps of one worker: a line between the points of `rows`, and what attention adds.

    gpu, model, machine: measured or computed for them; `gpu` is a pool's
    rows:              (tokens of a step, seconds) in rising order
    stepSeconds:       of each step, outside of the model: schedule, messages, HTTP of its tokens
    tokenSeconds:      the same, for each token that a step makes
    requestSeconds:    from a request's arrival until its engine has it, without a queue
    answerSeconds:     from a token's step to its client
    hopSeconds:        of a message between two workers
    transferSeconds:   of a transfer of KV, beside its bytes
    transferBytes:     per second of one link; absent = that of the network of the pools' GPUs
    kvBytes:           of a token
    sharedRates:       speed of each engine while 1, 2, ... of one machine compute, where all
                       workers share one; empty = each worker has its own
    """

    format: str
    model: str
    gpu: str
    machine: str
    source: str
    rows: tuple[tuple[_Count, _Seconds], ...]
    context_seconds: _Seconds = 0.0
    pair_seconds: _Seconds = 0.0
    step_seconds: _Seconds = 0.0
    token_seconds: _Seconds = 0.0
    request_seconds: _Seconds = 0.0
    answer_seconds: _Seconds = 0.0
    hop_seconds: _Seconds = 0.0
    transfer_seconds: _Seconds = 0.0
    transfer_bytes: _Rate | None = None
    kv_bytes: _Rate
    kv_tokens: _Count | None = None
    shared_rates: tuple[Annotated[float, msgspec.Meta(gt=0.0, le=1.0)], ...] = ()

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"format is {self.format!r}: give a file of {FORMAT}")
        if len(self.rows) < 2:
            raise ValueError(f"rows has {len(self.rows)} points: give two or more")
        for (before, _), (after, _) in pairwise(self.rows):
            if after <= before:
                raise ValueError(f"rows has {after} after {before}: sort the points by tokens")
        if self.rows[-1][1] <= 0.0:
            raise ValueError("rows ends with 0 seconds: give measured seconds")

    def seconds(self, work: SimulatedStep) -> float:
        return (
            self.of_rows(work.rows)
            + self.context_seconds * work.context
            + self.pair_seconds * work.pairs
            + self.step_seconds
            + self.token_seconds * work.samples
        )

    def decode_seconds(self, num_requests: int, context: float) -> float:
        """A step of decodes alone."""
        table = self._table
        rows = table[num_requests] if num_requests < NUM_ROWS else self._line(num_requests)
        return (
            rows
            + self.context_seconds * context
            + self.step_seconds
            + self.token_seconds * num_requests
        )

    def of_rows(self, num_rows: int) -> float:
        return self._table[num_rows] if num_rows < NUM_ROWS else self._line(num_rows)

    @cached_property
    def _table(self) -> Sequence[float]:
        return [self._line(number) for number in range(NUM_ROWS)]

    def _line(self, number: int) -> float:
        if number <= 0:
            return 0.0
        low, high = next(
            (pair for pair in pairwise(self.rows) if number <= pair[1][0]),
            (self.rows[-2], self.rows[-1]),
        )
        if number <= low[0]:
            return low[1]
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return max(0.0, low[1] + slope * (number - low[0]))


def read_step_model(path: Path) -> StepModel:
    """Raises StartError (exit code 2)."""
    fix = "make one with bench/step_times.py"
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepModel)
    except OSError as e:
        raise StartError(f"{path}: cannot be read: {e.strerror or e}; {fix}", exit_code=2) from e
    except msgspec.ValidationError as e:
        message = f"{path}: no file of step times: {e}; correct that, or {fix}"
        raise StartError(message, exit_code=2) from e
    except msgspec.DecodeError as e:
        raise StartError(f"{path}: is not JSON: {e}; {fix}", exit_code=2) from e


def write_step_model(times: StepModel, path: Path) -> None:
    """Raises OSError."""
    document = json.loads(msgspec.json.encode(times))
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
