"""Speed of one simulated worker, and how it differs by accelerator.

The defaults are estimates for a model of 70 billion parameters in bfloat16, from
data sheets: half of a B200's arithmetic for prefill, four fifths of a B300's
memory bandwidth for decode, 120 GiB of KV cache.  They were not measured; a
replay is as good as the numbers that it is given.
"""

from dataclasses import dataclass, fields

from pdcluster_api.errors import Fault, InvalidTraceError
from pdcluster_api.plan.autoscale.ratio import worker_weight
from pdcluster_api.schema.pdcluster import PDClusterSpec
from pdcluster_api.schema.sections import PoolSpec

ESTIMATED = {"prefill": "B200", "decode": "B300"}
"""Accelerator of each role that the defaults are estimates for."""


@dataclass(frozen=True)
class Speeds:
    """Speeds of one worker of the first pool of its role.

    prefill_tokens_per_second: of a busy prefill worker
    step_seconds:              of a decode step with one stream: the time per output token of an
                               idle worker
    stream_seconds:            that each further stream adds to the step
    kv_tokens:                 that a decode worker's KV cache holds
    start_seconds:             from the decision until a new worker is ready
    """

    prefill_tokens_per_second: float = 8_000.0
    step_seconds: float = 0.022
    stream_seconds: float = 0.0001
    kv_tokens: float = 393_000.0
    start_seconds: float = 120.0

    def __post_init__(self) -> None:
        for field in fields(self):
            number, may_be_zero = (
                getattr(self, field.name),
                field.name in ("stream_seconds", "start_seconds"),
            )
            if not (0.0 < number < 1e12 or (may_be_zero and number == 0.0)):
                fix = (
                    "give a finite number from 0 on"
                    if may_be_zero
                    else "give a finite number of more than 0"
                )
                raise InvalidTraceError(
                    [Fault("--" + field.name.replace("_", "-"), f"must not be {number:g}", fix)]
                )


def share_of_first(spec: PDClusterSpec, role: str, pool: PoolSpec) -> float:
    """Speed of a worker of a pool over one of the role's first pool, by accelerators.yaml."""
    first = spec.roles.present()[role].pools[0]
    return worker_weight(spec, role, pool) / worker_weight(spec, role, first)
