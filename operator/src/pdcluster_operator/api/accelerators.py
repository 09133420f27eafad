"""The accelerators that a pool may name, read once from accelerators.yaml.

Units are bytes per second and dense operations per second, per GPU.
Whether a node really has one is for the scheduler and the worker to find out.
"""

from functools import cache
from importlib.resources import files
from typing import Final

import yaml
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

NO_ACCELERATOR: Final = "cpu"
"""The `gpu` of a pool whose workers have no accelerator."""


class Accelerator(BaseModel):
    """One type of accelerator; None = depends on the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=to_camel)

    bandwidth_bytes: int | None
    fp8_flops: int | None
    bf16_flops: int | None
    resource: str | None
    node_labels: dict[str, str]


@cache
def accelerators() -> dict[str, Accelerator]:
    """Every known accelerator by the name that `gpu` takes."""
    table = yaml.safe_load(files("pdcluster_operator.api").joinpath("accelerators.yaml").read_text())
    return {name: Accelerator.model_validate(entry) for name, entry in table.items()}
