"""Speed of one simulated worker, and its ratio between accelerators.

The defaults are estimates from data sheets for a bfloat16 model of 70 billion parameters, not
measurements: half of a B200's arithmetic for prefill, four fifths of a B300's memory bandwidth for
decode, 120 GiB of KV cache.
"""

from dataclasses import dataclass, fields

from pdcluster_api.errors import InvalidTraceError
from pdcluster_api.plan.autoscale.ratio import worker_weight
from pdcluster_schema.errors import Fault
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import PoolSpec

ESTIMATED = {"prefill": "B200", "decode": "B300"}
"""Accelerator of each role that the defaults are estimates for."""


@dataclass(frozen=True)
class Speeds:
    """One worker of the first pool of its role.

    step_seconds:   of a decode step with one stream
    stream_seconds: that each further stream adds to a step
    kv_tokens:      capacity of a decode worker's KV cache
    start_seconds:  from the decision until a new worker is ready
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
    """Speed relative to the role's first pool, by accelerators.yaml."""
    first = spec.roles.present()[role].pools[0]
    return worker_weight(spec, role, pool) / worker_weight(spec, role, first)
