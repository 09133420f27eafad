"""Inputs of a simulation: its requests, and the seconds of the steps of each pool's workers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pdcluster_api.errors import StartError
from pdcluster_api.plan.autoscale.pools import worker_weight
from pdcluster_api.traces.loads import drawn_requests, read_loads
from pdcluster_api.traces.requests import LoadTrace, read_requests
from pdcluster_schema.accelerators import accelerators
from pdcluster_schema.faults import Fault, InvalidObjectError
from pdcluster_schema.pdcluster import PDClusterSpec
from pdcluster_schema.sections import PoolSpec
from pdcluster_schema.vllm_flags import flags_of
from pdcluster_schema.workload import PoolKey
from pdcluster_simulator.step_model import FORMAT, StepModel, read_step_model
from pdctl.simulation.speeds import ESTIMATED, Speeds
from pdctl.sizing import tables
from pdctl.sizing.objective import Objective
from pdctl.sizing.profile import EngineProfile, RankLayout
from pdctl.sizing.roofline import can_estimate, roofline_profile, sequence_kv_bytes
from pdctl.sizing.shape import read_shape

# Two profiles of one engine, whose difference is what attention takes.
_SHORT = Objective(512, 64, 1e3, 1e3)
_LONG = Objective(8192, 64, 1e3, 1e3)

# Outside of the model, of an engine on a GPU; estimates, since no GPU was there to measure them.
_STEP_SECONDS, _REQUEST_SECONDS, _HOP_SECONDS = 0.0005, 0.003, 0.0005
_EXPERT_PARALLEL = ("enable-expert-parallel", "ep-size", "expert-parallel-size")
_AT_ONCE = 1e15  # bytes a second


def read_trace(path: Path, seed: str, block_tokens: int) -> LoadTrace:
    """Single requests of a file of JSON lines, or drawn from the loads of one of CSV.

    Raises InvalidTraceError.
    """
    if path.suffix == ".csv":
        return drawn_requests(read_loads(path), seed)
    return read_requests(path, block_tokens)


def times_of_speeds(spec: PDClusterSpec, speeds: Speeds) -> dict[PoolKey, StepModel]:
    """Pools after a role's first are scaled by their accelerators, and KV moves at once."""
    found: dict[PoolKey, StepModel] = {}
    for role, declared in spec.roles.computing().items():
        first = worker_weight(spec, role, declared.pools[0])
        for pool in declared.pools:
            share, number = (
                worker_weight(spec, role, pool) / first,
                spec.gpus_per_replica(role, pool),
            )
            source = "given speeds"
            if speeds.is_estimate(role):
                source = (
                    f"estimated for one {ESTIMATED[role]} and a 70B model: give your own before "
                    "you believe a figure (see --help)"
                )
            found[role, pool.name] = StepModel(
                format=FORMAT,
                model=spec.model.name,
                gpu=pool.gpu,
                machine=f"for {role}" + (f", {number} in a worker" if number > 1 else ""),
                source=source,
                rows=tuple((tokens, taken / share) for tokens, taken in speeds.rows(role)),
                kv_bytes=1.0,
                kv_tokens=speeds.kv_tokens,
                transfer_bytes=_AT_ONCE,
            )
    return found


@dataclass(frozen=True)
class TimesSource:
    """files: of step times; model: in the tables, or a folder with config.json; None = neither"""

    files: Sequence[Path]
    model: str | None
    engine: str = "vllm"


def step_times(spec: PDClusterSpec, source: TimesSource) -> dict[PoolKey, StepModel]:
    """By (role, pool).  Raises StartError, InvalidObjectError."""
    measured = {}
    for path in source.files:
        times = read_step_model(path)
        if times.model != spec.model.name:
            message = (
                f"{path}: was measured with the model {times.model}, and the file's "
                f"spec.model.name is {spec.model.name}; measure that model, or correct the name"
            )
            raise StartError(message, exit_code=2)
        measured[times.gpu] = times
    found: dict[PoolKey, StepModel] = {}
    faults: list[Fault] = []
    for role, declared in spec.roles.computing().items():
        for index, pool in enumerate(declared.pools):
            each = measured.get(pool.gpu) or _computed(spec, role, pool, source)
            if isinstance(each, StepModel):
                found[role, pool.name] = each
            else:
                faults.append(Fault(f"spec.roles.{role}.pools[{index}].gpu", *each))
    if faults:
        raise InvalidObjectError(faults)
    return found


def _computed(
    spec: PDClusterSpec, role: str, pool: PoolSpec, source: TimesSource
) -> StepModel | tuple[str, str]:
    """From the tables, or by our roofline; else a reason and a fix."""
    gpu, model = pool.gpu, source.model
    hardware = spec.hardware(gpu)
    if not can_estimate(hardware):
        reason = f"{gpu} has no numbers to compute the seconds of a step from"
        fix = f"measure it and give --steps FILE, or give spec.accelerators.{gpu} its numbers"
        return reason, fix
    if model is None:
        reason = f"{gpu} has no step times"
        return reason, "give --steps FILE, or --model NAME or FOLDER for the tables"
    engine = spec.engine_of(role)
    layout = RankLayout(
        engine.tensor_parallel_size, is_expert_parallel=_is_expert_parallel(engine.args or ())
    )
    if gpu in tables.SYSTEMS and gpu in accelerators() and tables.is_installed():
        known = tables.known_models().get(tables.short_name(model))
        if known is not None or Path(model).is_dir():
            silicon = tables.SiliconTables(known or model, source.engine)
            profiles = [silicon.profiles(gpu, [layout], goal) for goal in (_SHORT, _LONG)]
            if all(profiles):
                return _times(spec, role, profiles[0][0], profiles[1][0], silicon.kv_bytes)
    if not Path(model).is_dir():
        names = ", ".join(tables.known_models()) if tables.is_installed() else "none"
        reason = f"{gpu}: the tables have no steps of {model} with {layout} ({names})"
        return reason, "give --model the model's folder, for our roofline, or --steps FILE"
    shape = read_shape(Path(model))
    short, long = (roofline_profile(gpu, hardware, layout, shape, goal) for goal in (_SHORT, _LONG))
    if short is None or long is None:
        reason = f"{gpu}: weights and the KV of a prompt of {_LONG.input_tokens} do not fit"
        return reason, "raise engine.tensorParallelSize"
    return _times(spec, role, short, long, float(sequence_kv_bytes(shape, 1)))


def _is_expert_parallel(args: Sequence[str]) -> bool:
    """By flags of vLLM and SGLang.  Engines of several data-parallel ranks are refused before.

    >>> _is_expert_parallel(["--seed=1", "-ep"]), _is_expert_parallel(["--ep-size", "8"])
    (True, True)
    >>> _is_expert_parallel(["--ep-size=1", "--no-enable-expert-parallel"])
    False
    """
    values = {flag.name: flag.value for flag in flags_of(args)}
    return any(values.get(name, "1") not in ("1", "false") for name in _EXPERT_PARALLEL)


def _times(
    spec: PDClusterSpec, role: str, short: EngineProfile, long: EngineProfile, kv_bytes: float
) -> StepModel:
    engine = spec.engine_of(role)
    is_given = "max_batched_tokens" in engine.model_fields_set
    kv_tokens = short.kv_of(engine.max_batched_tokens) if is_given else 0
    streams = max(set(short.decode) & set(long.decode))
    context = [goal.input_tokens + goal.output_tokens / 2 for goal in (_SHORT, _LONG)]
    slower = long.decode[streams] - short.decode[streams]
    of_context = max(0.0, slower / (streams * (context[1] - context[0])))
    rows = {
        number: max(1e-6, seconds - of_context * number * context[0])
        for number, seconds in short.decode.items()
    }
    last = max(rows)
    rows |= {
        number * _SHORT.input_tokens: seconds
        for number, seconds in short.prefill.items()
        if number * _SHORT.input_tokens > last
    }
    points = _rising(sorted(rows.items()))
    plain = StepModel(
        format=FORMAT,
        model=spec.model.name,
        gpu=short.gpu,
        machine=f"{short.layout}",
        source=short.source,
        rows=points,
        kv_bytes=kv_bytes,
        context_seconds=of_context,
        step_seconds=_STEP_SECONDS,
        request_seconds=_REQUEST_SECONDS,
        answer_seconds=_HOP_SECONDS,
        hop_seconds=_HOP_SECONDS,
        transfer_seconds=_HOP_SECONDS,
        kv_tokens=kv_tokens or short.least_kv_tokens,
    )
    tokens = _LONG.input_tokens
    beyond = long.prefill[1] - plain.of_rows(tokens)
    fields = {name: getattr(plain, name) for name in plain.__struct_fields__}
    return StepModel(**fields | {"pair_seconds": max(0.0, beyond / (tokens * (tokens + 1) / 2))})


def _rising(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """No point takes less time than the one before: tables of kernels have such places."""
    found = [points[0]]
    for (_, _), (number, seconds) in pairwise(points):
        found.append((number, max(seconds, found[-1][1])))
    return tuple(found)


def sources_of(times: Mapping[PoolKey, StepModel]) -> list[str]:
    return list(
        dict.fromkeys(f"{each.gpu} {each.machine}: {each.source}" for each in times.values())
    )
