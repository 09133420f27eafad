"""The PDCluster of a placement, with routing, autoscale and the parallelism of each role."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from pdcluster_schema.latency import LATENCY_BUCKETS
from pdcluster_schema.pdcluster import KIND
from pdctl.sizing.objective import Objective
from pdctl.sizing.search import Placement, PlannedRole, SearchInput
from pdctl.sizing.tables import MEMORY_SHARE
from pdctl.sizing.waiting import streams_at

_IMAGES = {"vllm": "vllm/vllm-openai:v0.32.0", "sglang": "lmsysorg/sglang:v0.5.23"}
_CPUS, _GIBIBYTES = 8, 64  # of a pod, for each GPU
_STEP = 64  # tokens, by which the break-even length is rounded
_NAME_LENGTH = 30


@dataclass(frozen=True)
class PlannedModel:
    """folder: of the model in the volume `models`; has_fp8_kv: the plan has KV of one byte;
    max_length: tokens of a request, 0 = not known.
    """

    folder: str
    engine: str
    has_fp8_kv: bool
    max_length: int = 0


def manifest_of(model: PlannedModel, plan: Placement, given: SearchInput) -> dict[str, Any]:
    goal = given.objective
    name = re.sub("[^a-z0-9]+", "-", model.folder.lower()).strip("-").lstrip("0123456789-")
    engine: dict[str, Any] = {
        "type": model.engine,
        "image": _IMAGES[model.engine],
        "deviceMemoryShare": MEMORY_SHARE,
    }
    if length := _max_model_len(model, plan, goal):
        engine["maxModelLen"] = length
    spec: dict[str, Any] = {
        "model": {
            "name": model.folder,
            "pvc": {"claimName": "models"},
            "path": model.folder,
        },
        "engine": engine,
        "roles": {name: _role(parts, model, given) for name, parts in _roles(plan).items()},
        "qos": {
            "slo": {
                "ttftMilliseconds": 1e3 * goal.ttft_seconds,
                "tpotMilliseconds": 1e3 * goal.itl_seconds,
            }
        },
        "autoscale": _autoscale(plan, given),
        "rollout": {"strategy": "Recreate"},
    }
    if prices := {gpu: given.prices[gpu] for gpu in plan.gpus_of if gpu in given.prices}:
        spec["accelerators"] = {gpu: {"pricePerHour": price} for gpu, price in prices.items()}
    if plan.kind == "split":
        # the plan computes its own prompts on prefill workers, whatever a decode step would bear
        decodes = _roles(plan)["decode"]
        bearable = min(break_even_tokens(role, goal.itl_seconds) for role in decodes)
        short = goal.lengths.short if goal.lengths else goal.input_tokens
        length = max(0, min(bearable, short - 1))
        spec["routing"] = {"offload": {"prefillLengthThreshold": length}}
    else:
        spec["routing"] = {"decodeScore": {"policy": "leastRequest"}}
    return {
        "apiVersion": "pdcluster.io/v1alpha1",
        "kind": KIND,
        "metadata": {"name": name[:_NAME_LENGTH].rstrip("-") or "model"},
        "spec": spec,
    }


def _max_model_len(model: PlannedModel, plan: Placement, goal: Objective) -> int:
    """Length of a request in all roles: an engine whose KV does not hold one refuses to start.
    0 = the model's own, which is not known.
    """
    if not model.max_length:
        return 0
    held = min(role.profile.kv_of(role.max_batched_tokens) for role in plan.roles)
    return max(min(model.max_length, held), goal.longest_tokens)


def break_even_tokens(decode: PlannedRole, itl_seconds: float) -> int:
    """Longest prompt whose prefill beside the streams keeps a decode step within the objective.

    Between the sizes that the profile has, on a line.
    """
    profile, streams = decode.profile, decode.batch
    tokens, before = 0.0, (0, profile.decode[streams])
    for (budget, number), seconds in sorted(profile.mixed.items()):
        if number != streams or budget <= streams:
            continue
        share = (itl_seconds - before[1]) / max(seconds - before[1], 1e-9)
        tokens = before[0] + min(1.0, max(0.0, share)) * (budget - streams - before[0])
        before = (budget - streams, seconds)
        if share < 1.0:
            break
    return max(_STEP, int(tokens) // _STEP * _STEP)


def _roles(plan: Placement) -> dict[str, list[PlannedRole]]:
    """By their names: one for each GPU type, with the same settings of engines."""
    found: dict[str, list[PlannedRole]] = {}
    for role in plan.roles:
        found.setdefault(role.role, []).append(role)
    return found


def _role(parts: Sequence[PlannedRole], model: PlannedModel, given: SearchInput) -> dict[str, Any]:
    role, layout = parts[0], parts[0].profile.layout
    batch = max(part.batch for part in parts)
    sequences = int(streams_at(batch, given.objective.percentile)) + 1
    engine: dict[str, Any] = {
        "tensorParallelSize": layout.tensor,
        "maxBatchedTokens": max(role.max_batched_tokens, sequences),
        "maxSequences": max(8, sequences),
    }
    if layout.data > 1:
        engine["dataParallelSize"] = layout.data
    if args := list(_args(role, model)):
        engine["args"] = args
    memory = f"{_GIBIBYTES * layout.gpus}Gi"
    return {
        "engine": engine,
        "pools": [
            {
                "name": part.profile.gpu.lower(),
                "gpu": part.profile.gpu,
                "replicas": part.workers,
                "minReplicas": 1,
                "maxReplicas": given.gpus[part.profile.gpu] // layout.gpus,
            }
            for part in parts
        ],
        "resources": {
            "requests": {"cpu": str(_CPUS * layout.gpus), "memory": memory},
            "limits": {"memory": memory},
        },
    }


def _args(role: PlannedRole, model: PlannedModel) -> Iterator[str]:
    layout = role.profile.layout
    if layout.is_expert_parallel:
        yield "--enable-expert-parallel" if model.engine == "vllm" else f"--ep-size={layout.gpus}"
    if model.has_fp8_kv:
        yield "--kv-cache-dtype=" + ("fp8" if model.engine == "vllm" else "fp8_e4m3")


def _autoscale(plan: Placement, given: SearchInput) -> dict[str, Any]:
    goal = given.objective
    used = {gpu: number for gpu, number in given.gpus.items() if gpu in plan.gpus_of}
    found: dict[str, Any] = {
        "mode": "Advise",
        "objective": {
            "ttft": _latency(goal.ttft_seconds, goal.percentile),
            "itl": _latency(goal.itl_seconds, goal.percentile),
        },
        "budget": {"perGpu": used},
    }
    return found


def _latency(seconds: float, percentile: float | None) -> dict[str, Any]:
    """The autoscaler knows whole percentiles up to 99, of what its buckets tell apart."""
    if percentile is None or seconds > LATENCY_BUCKETS[-2]:
        return {"seconds": seconds}
    return {"seconds": seconds, "percentile": min(99, math.ceil(percentile))}


def manifest_text(document: dict[str, Any], head: str) -> str:
    """head: lines of the comment before it."""
    comment = "".join(f"# {line}\n" for line in head.splitlines())
    return comment + yaml.safe_dump(document, sort_keys=False, default_flow_style=None)
