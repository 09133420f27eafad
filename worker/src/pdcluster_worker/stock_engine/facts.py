"""Facts of a running stock engine: version, model, sizes, and those of the pair check.

Version, connector and dtype keep engines apart that could not read one another's KV.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pdcluster_schema.kv_shape import KVShape, language_config
from pdcluster_worker.config.worker import NO_ACCELERATOR, WorkerConfig
from pdcluster_worker.errors import ConfigError, ModelError
from pdcluster_worker.messages.engine import EngineReady
from pdcluster_worker.messages.facts import UNKNOWN_DEVICE, DeviceFacts, KVGeometry
from pdcluster_worker.messages.requests import RequestSpec, SamplingParams
from pdcluster_worker.stock_engine.engine_api import VLLM_API, EngineApi
from pdcluster_worker.stock_engine.front_end import MISSING, check_endpoints, makes_embeddings
from pdcluster_worker.stock_engine.http import HttpFailedError, StockClient
from pdcluster_worker.stock_engine.metrics_page import Scrape
from pdcluster_worker.system.fingerprint import fingerprint
from pdcluster_worker.system.nvidia import GpuReport, NamedGpu, read_report

TRANSPORT = "nixl"
_WARM_UP_TOKENS = 64
# vLLM's minimum where `maxBatchedTokens` is left to it; it does not report its own
_STEP_TOKENS = 2048

# its VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS; kernels that compile at a new shape may take minutes
_OWN_STOP_SECONDS = 300.0

REPORT_SECONDS = 30.0  # three rounds of the probe that writes the GPUs' report
POLL_SECONDS = 1.0
_BUILDS = ("rocm", "tpu", "xpu")
_LEAST_USED = 0.01  # of a GPU's memory: an idle one uses less, a serving engine more


@dataclass(frozen=True, slots=True)
class StockFacts:
    """Facts of one rank.  scrape: its numbers at that time.  embeds: it generates no text."""

    ready: EngineReady
    scrape: Scrape
    embeds: bool = False


class _Version(msgspec.Struct):
    version: str = ""


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Card] = []


async def read_facts(
    ranks: Sequence[StockClient], config: WorkerConfig, api: EngineApi = VLLM_API
) -> list[StockFacts]:
    """ranks: a client of each.  Raises ConfigError, ModelError, HttpFailedError."""
    http = ranks[0]
    version = msgspec.json.decode(await http.get_patiently(api.version_path), type=_Version).version
    unknown = api.unknown_version(version)
    if unknown and not config.engine.vllm.allow_unknown_version:
        raise ConfigError(f"{unknown}, or set engine.allowUnknownVersion: true")
    embeds = await _makes_embeddings(http, config)
    card = await _check_served(http, config, "" if embeds else version)
    shape = await asyncio.to_thread(read_shape, Path(config.model.path))
    longest = [0.0] * len(ranks) if embeds else await _warm_up_all(ranks, config, api, version)
    scrapes = api.read_numbers(await http.get_patiently(api.numbers_path), len(ranks))
    if not all(scrape.num_blocks and scrape.block_size for scrape in scrapes):
        named = f"{api.name} {version}"
        raise ConfigError(f"{named} does not say the size of its KV cache in {api.numbers_path}")
    dtype = shape.dtype if config.model.dtype == "auto" else config.model.dtype
    device = msgspec.structs.replace(
        await read_device(api.name, version, config.gpu),
        operations=f"{api.kind} {version}",
        model_code=api.kind,
        tensor_parallel_size=config.engine.tensor_parallel_size,
        pipeline_parallel_size=config.engine.pipeline_parallel_size,
        engine_note=_note_of(api.name, version, unknown, config.engine.vllm.tagged_version),
    )
    ready = EngineReady(
        engine_id="",  # of each rank, as its ports, blocks and steps are
        kv_ports=[],
        geometry=KVGeometry(
            *(shape.num_kv_heads, shape.head_dim, shape.num_layers, scrapes[0].block_size),
            dtype=dtype,
            kind=f"{api.kind}-{version}-{TRANSPORT}",
        ),
        weights=shape.fingerprint,
        dtype=dtype,
        num_blocks=0,
        max_model_len=min(api.longest(card.max_model_len or 0, each) for each in scrapes),
        vocab_size=shape.vocab_size,
        device=device,
        transport="" if config.role == "mixed" else TRANSPORT,  # mixed ones have no connector
        scheduler=api.kind,
        restarts_grammar=True,
        prefix_caching=scrapes[0].prefix_caching,
        own_stop_seconds=_OWN_STOP_SECONDS,
    )
    return [
        StockFacts(
            msgspec.structs.replace(
                ready,
                engine_id=uuid.uuid4().hex,
                kv_ports=[config.engine.vllm.side_channel_port + rank],
                num_blocks=scrape.num_blocks,
                longest_step_seconds=longest[rank],
            ),
            scrape,
            embeds,
        )
        for rank, scrape in enumerate(scrapes)
    ]


def _note_of(name: str, version: str, unknown: str, tagged: str) -> str:
    """Fault of the version of an engine that serves; empty where it is as declared."""
    if unknown:
        return f"{unknown}; served, since engine.allowUnknownVersion is true"
    if tagged and version.partition("+")[0] != tagged:
        return (
            f"is {name} {version}, and the tag of its image says {tagged}; give the tag that it is"
        )
    return ""


async def _makes_embeddings(http: StockClient, config: WorkerConfig) -> bool:
    """Raises ConfigError for a worker that is to generate text."""
    embeds = config.model.frontend == "engine" and await makes_embeddings(http)
    if embeds and config.role != "mixed":
        raise ConfigError("a model that makes embeddings has no decode: give it roles.mixed alone")
    return embeds


async def _check_served(http: StockClient, config: WorkerConfig, version: str) -> _Card:
    """The card of the model.  version: of an engine that is to have the endpoints for text.

    Raises ConfigError where the engine lacks what the object names.
    """
    if version and config.model.frontend == "engine":
        await check_endpoints(http, version)
    models = msgspec.json.decode(await http.get_patiently("/v1/models"), type=_Models).data
    lacking = {*config.model.adapters} - {card.id for card in models}
    if lacking:
        raise ConfigError(
            f"the engine lacks adapters: start it with {min(lacking)!r} of --lora-modules"
        )
    return _card_of(models, config.model.name)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """From the model's config.json; 0 or empty where it has no such field."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    dtype: str
    fingerprint: str


def read_shape(folder: Path) -> ModelShape:
    """Raises ModelError."""
    try:
        config = language_config(json.loads((folder / "config.json").read_bytes()))
    except (OSError, ValueError, TypeError) as e:
        raise ModelError(f"the model's folder {folder} has no readable config.json: {e}") from e
    kv, vocab_size = KVShape.of(config), config.get("vocab_size")
    return ModelShape(
        num_layers=kv.num_layers,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        vocab_size=vocab_size if isinstance(vocab_size, int) else 0,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        fingerprint=fingerprint(folder),
    )


def _card_of(models: list[_Card], name: str) -> _Card:
    card = next((card for card in models if card.id == name), None)
    if card is None:
        served = ", ".join(card.id for card in models) or "nothing"
        raise ConfigError(
            f"the engine serves {served}, not {name}: start it with --served-model-name {name}"
        )
    return card


async def _warm_up_all(
    ranks: Sequence[StockClient], config: WorkerConfig, api: EngineApi, version: str
) -> list[float]:
    """Seconds of the longest step of each rank."""
    try:
        return await asyncio.gather(
            *(_warm_up(client, config, api, 3 * rank) for rank, client in enumerate(ranks))
        )
    except HttpFailedError as e:
        if e.status not in MISSING:
            raise
        raise ConfigError(
            f"{api.name} {version} has no {api.generate_path} for this model: give one that "
            "generates text, and leave --runner and --convert out of engine.args; one that makes "
            "embeddings needs roles.mixed and model.frontend: engine"
        ) from e


async def _warm_up(http: StockClient, config: WorkerConfig, api: EngineApi, first: int) -> float:
    """Seconds that a whole step may take, scaled up from a short prompt.  first: number of its
    three prompts.

    The prompt comes after vLLM has compiled its operations, which would count as a stall.
    """
    model = config.model.name
    scored = _warm_up_spec(
        first, SamplingParams(max_tokens=2, seed=0, logprobs=1, prompt_logprobs=1)
    )
    for body in (
        api.generate(scored, model, attempt=1),
        api.prompt_only(scored, model, attempt=1),
    ):
        with contextlib.suppress(HttpFailedError):  # log probabilities may be disabled
            await http.post(api.generate_path, body)
    seconds = 0.0
    for number in (first + 1, first + 2):
        plain = _warm_up_spec(number, SamplingParams(max_tokens=1, seed=0))
        start = time.monotonic()
        await http.post(api.generate_path, api.prompt_only(plain, model, attempt=1))
        seconds = time.monotonic() - start
    return seconds * max(config.engine.max_batched_tokens, _STEP_TOKENS) / _WARM_UP_TOKENS


def _warm_up_spec(number: int, sampling: SamplingParams) -> RequestSpec:
    return RequestSpec(f"warm-up-{number}", [number] * _WARM_UP_TOKENS, sampling)


async def read_device(
    name: str, version: str, gpu: str, read: Callable[[], GpuReport] = read_report
) -> DeviceFacts:
    """name: of the engine.  version: its own, such as 0.32.0+cpu.  gpu: the pool's type."""
    build = version.partition("+")[2].split(".")
    if "cpu" in build or gpu == NO_ACCELERATOR:
        return DeviceFacts("cpu", "cpu")
    for kind in _BUILDS:
        if any(part.startswith(kind) for part in build):
            return DeviceFacts(kind, kind)
    return device_of(await _report(read), name)


def device_of(report: GpuReport, name: str) -> DeviceFacts:
    """Device of a serving engine, by the memory that its GPUs use."""
    gpus = report.gpus
    if not gpus:
        return DeviceFacts(UNKNOWN_DEVICE, "", note=f"{name} does not say it, and {report.reason}")
    used = [gpu for gpu in gpus if gpu.use.used >= _LEAST_USED * gpu.use.total]
    if not used:
        note = f"it serves, and {_counted(gpus)} of its container hold nothing"
        return DeviceFacts("cpu", "cpu", note=note)
    idle = f"; {len(gpus) - len(used)} more hold nothing" if len(used) < len(gpus) else ""
    memory = min(gpu.use.total for gpu in used) / 2**30
    return DeviceFacts("cuda", _counted(used), note=f"{memory:.0f} GiB each{idle}")


def _counted(gpus: Sequence[NamedGpu]) -> str:
    counts = Counter(gpu.name for gpu in gpus)
    return ", ".join(f"{num} x {name}" if num > 1 else name for name, num in counts.items())


async def _report(read: Callable[[], GpuReport]) -> GpuReport:
    """The first report with GPUs, or the last one."""
    polls = round(REPORT_SECONDS / POLL_SECONDS)
    for _ in range(polls):
        report = read()
        if report.gpus:
            return report
        await asyncio.sleep(POLL_SECONDS)
    return read()
