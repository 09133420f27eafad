"""The accelerators that a pool may name, read once from accelerators.yaml.

Units are bytes per second and dense operations per second, per GPU.
Whether a node really has one is for the scheduler and the worker to find out.
"""

from functools import cache
from importlib.resources import files
from typing import Final, Literal

import yaml
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from pdcluster_schema.ports import MAX_RANKS

Precision = Literal["bf16", "fp8", "fp4"]
"""Precision in which an engine computes the products of a layer."""

NUMBERS: Final = (
    *("memoryBytes", "bandwidthBytes", "bf16Flops", "fp8Flops", "fp4Flops"),
    *("linkBytes", "networkBytes", "pricePerHour"),
)
"""Fields that say what an accelerator can do and costs, not where it is: they change nothing of a
pod.
"""

_OF_A_NODE: Final = {"GB200": 4, "GB300": 4}

NO_ACCELERATOR: Final = "cpu"
"""The `gpu` of a pool whose workers have no accelerator."""


class Accelerator(BaseModel):
    """One type of accelerator; None = depends on the machine, or is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)

    source: str
    memory_bytes: int | None
    bandwidth_bytes: int | None
    bf16_flops: int | None
    fp8_flops: int | None
    fp4_flops: int | None
    link_bytes: int | None
    network_bytes: int | None
    resource: str | None
    node_labels: dict[str, str]

    @property
    def break_even_tokens(self) -> int | None:
        """Uncached prompt tokens from which a prefill lengthens a decode step; None = not known.

        A step reads each weight once, of two bytes, and computes two operations with it for each
        token: up to operations per second / bytes per second tokens are computed within the time
        of the reading.

        >>> accelerators()["H100"].break_even_tokens, accelerators()["B200"].break_even_tokens
        (295, 281)
        """
        if self.bandwidth_bytes is None or self.bf16_flops is None:
            return None
        return round(self.bf16_flops / self.bandwidth_bytes)

    def computes_in(self, precision: Precision) -> bool:
        """Return whether it has units for a precision, or its rates are not known."""
        units = {"bf16": self.bf16_flops, "fp8": self.fp8_flops, "fp4": self.fp4_flops}
        return self.bf16_flops is None or units[precision] is not None


def gpus_per_node(gpu: str) -> int:
    """Most accelerators of one machine, where nothing else is given."""
    return _OF_A_NODE.get(gpu, MAX_RANKS)


def accelerators_text(gpu: str, number: int) -> str:
    """The accelerators of one worker as text.

    >>> accelerators_text("B200", 1), accelerators_text("B200", 8)
    ('B200', '8 x B200')
    """
    return gpu if number == 1 else f"{number} x {gpu}"


@cache
def accelerators() -> dict[str, Accelerator]:
    """Every known accelerator by the name that `gpu` takes."""
    table = yaml.safe_load(files("pdcluster_schema").joinpath("accelerators.yaml").read_text())
    return {name: Accelerator.model_validate(entry) for name, entry in table.items()}
