"""The engine file, immutable for a revision, and the worker's identity."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from pdcluster_schema.ports import (
    GRACE_SECONDS,
    GRPC_PORT,
    HTTP_PORT,
    KV_PORT,
    MAX_ENGINES,
    PICKER_PORT,
    join_address,
)
from pdcluster_schema.sections import ENGINELESS
from pdcluster_worker.config.documents import converted, document_of
from pdcluster_worker.config.engine import EngineConfig
from pdcluster_worker.errors import ConfigError, DeviceError
from pdcluster_worker.messages.engine_settings import Positive, Section
from pdcluster_worker.system.cgroups import available_threads
from pdcluster_worker.system.nvidia import count_gpus

MAX_TEMPLATE = 65_536  # characters

ToolParserName = Literal[
    "auto", "none", "hermes", "llama3_json", "mistral", "pythonic", "qwen", "qwen3_coder"
]
ReasoningParserName = Literal["auto", "none", "deepseek_r1", "qwen3"]


class RuntimeAdaptersConfig(Section, frozen=True):
    """path: the folder below which adapters may be loaded; memory: of all of them, in bytes."""

    path: Annotated[str, msgspec.Meta(min_length=1)]
    memory: Positive


class ModelConfig(Section, frozen=True):
    name: str
    path: str
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto = one for the revision
    # Jinja, or a name of `server.text.chat_template.TEMPLATES`
    chat_template: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEMPLATE)] | None = None
    tool_parser: ToolParserName = "auto"  # auto = by the chat template
    reasoning_parser: ReasoningParserName = "auto"
    frontend: Literal["pdcluster", "engine"] = "pdcluster"  # engine = of a stock engine
    adapters: tuple[str, ...] = ()  # LoRA adapters that clients may call in place of the model
    # their folders, by name, where our own engine computes
    adapter_paths: dict[str, str] = msgspec.field(default_factory=dict)
    runtime_adapters: RuntimeAdaptersConfig | None = None  # None = none is loaded later


Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Role = Literal["prefill", "decode", "mixed", "router", "picker"]

ALL_OF_IPV4, ALL_ADDRESSES = "0.0.0.0", "::"
NO_ACCELERATOR = "cpu"  # the `gpu` of a pool whose workers have none


class ListenConfig(Section, frozen=True):
    """Port 0 = any free port, announced in etcd."""

    host: str = ALL_OF_IPV4
    http_host: str | None = None  # None = at `host`
    http: Port = HTTP_PORT
    grpc: Port = GRPC_PORT
    kv: Port = KV_PORT
    picker: Port = PICKER_PORT  # of a picker, for gateways
    head: Port | None = None  # where headless engines join; None = none may
    # of those that the worker waits for before it serves
    headless: Annotated[int, msgspec.Meta(ge=0, lt=MAX_ENGINES)] = 0
    api_keys: str | None = None  # folder with one key per file; None = no key needed

    def http_address(self, own: str, port: int) -> str:
        """The address at which others reach HTTP.  own: the worker's."""
        is_own = self.http_host in (None, ALL_OF_IPV4, ALL_ADDRESSES)
        return join_address(own if is_own else str(self.http_host), port)


class EtcdTLSConfig(Section, frozen=True):
    """certificate, key: only where etcd requires them of clients."""

    ca: str
    certificate: str | None = None
    key: str | None = None


class DiscoveryConfig(Section, frozen=True):
    """endpoints: host:port; lease_seconds: of this worker's record."""

    endpoints: Annotated[list[str], msgspec.Meta(min_length=1)]
    tls: EtcdTLSConfig | None = None
    lease_seconds: Positive = 10


class TLSConfig(Section, frozen=True):
    ca: str
    certificate: str
    key: str


class WorkerConfig(Section, frozen=True):
    cluster: str
    revision: str
    role: Role
    pool: str
    model: ModelConfig
    discovery: DiscoveryConfig
    tls: TLSConfig
    gpu: str = NO_ACCELERATOR
    engine: EngineConfig = EngineConfig()
    listen: ListenConfig = ListenConfig()

    def __post_init__(self) -> None:
        delayer = self.engine.prefill_delayer
        if self.role in ("decode", *ENGINELESS) and delayer is not None and delayer.enabled:
            raise ValueError(
                f"engine.prefillDelayer is for prefill and mixed workers, not for {self.role}: "
                "remove it or set enabled: false"
            )
        if self.role in ("prefill", *ENGINELESS) and self.engine.drafts is not None:
            raise ValueError(
                f"engine.speculation is for decode and mixed workers, not for {self.role}: remove "
                'it or set method: "Off"'
            )
        is_other = self.engine.type != "vllm" and self.role not in ENGINELESS
        if self.model.frontend == "engine" and is_other:
            raise ValueError("model.frontend: engine is for engine.type: vllm: leave it out")
        names = self.model.adapters
        if len({self.model.name, *names}) <= len(names):
            raise ValueError(
                f"model.adapters has {', '.join(names)}, and each name must differ from the others "
                f"and from model.name, {self.model.name}: rename one of them"
            )
        computes = self.engine.type == "pdcluster" and self.role not in ENGINELESS
        needed = set(self.model.adapters) if computes else set()
        if needed != self.model.adapter_paths.keys():
            raise ValueError(
                f"model.adapterPaths has {_names(self.model.adapter_paths)}, and needs the folder "
                f"of each adapter that this worker's own engine loads, {_names(needed)}: give "
                "these alone"
            )
        sizes = self.engine.num_ranks * self.engine.data_parallel_size
        if self.model.runtime_adapters is not None and not (computes and sizes == 1):
            raise ValueError(
                "model.runtimeAdapters is for workers with one engine of ours, of one rank: leave "
                "it out"
            )
        if self.role in ENGINELESS and self.gpu != NO_ACCELERATOR:
            raise ValueError(
                f"gpu: {self.gpu} is not for a {self.role}, which has no engine: remove it"
            )


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


class Identity(msgspec.Struct, frozen=True):
    """From the downward API or `pdctl`."""

    pod: str
    namespace: str
    address: str  # what peers connect to
    grace_seconds: float = inf  # from SIGTERM to SIGKILL, unless a command says that it is less

    @classmethod
    def from_env(cls) -> "Identity":
        """Raises ConfigError naming the missing variable."""
        values = {
            name: os.environ.get(name, "") for name in ("POD_NAME", "POD_NAMESPACE", "POD_IP")
        }
        missing = [name for name, value in values.items() if not value]
        if missing:
            raise ConfigError(
                f"environment variable {missing[0]} is not set: set it from the downward API, or "
                "start the worker with pdctl"
            )
        return cls(
            pod=values["POD_NAME"],
            namespace=values["POD_NAMESPACE"],
            address=values["POD_IP"],
            grace_seconds=_grace_seconds(),
        )


def _grace_seconds() -> float:
    """Raises ConfigError."""
    given = os.environ.get(GRACE_SECONDS)
    if given is None:
        return inf
    if not given.isdecimal():
        raise ConfigError(
            f"environment variable {GRACE_SECONDS} is {given!r}: set it to the whole seconds from "
            "SIGTERM to SIGKILL, or leave it out"
        )
    return float(given)


def load_worker_config(path: Path) -> WorkerConfig:
    """Raises ConfigError.  With an IPv6 POD_IP, "all addresses" are those of both families."""
    config = converted(path, document_of(path), WorkerConfig)
    _check_divisible(path, config.engine)
    if config.listen.host == ALL_OF_IPV4 and ":" in os.environ.get("POD_IP", ""):
        return msgspec.structs.replace(
            config, listen=msgspec.structs.replace(config.listen, host=ALL_ADDRESSES)
        )
    return config


def _check_divisible(path: Path, engine: EngineConfig) -> None:
    """Raise ConfigError where an engine of the worker would get no KV block."""
    num_blocks, size = engine.num_blocks, engine.data_parallel_size
    if num_blocks is not None and num_blocks < size:
        raise ConfigError(
            f"{path}: engine.numBlocks ({num_blocks}) must be at least dataParallelSize ({size}), "
            "whose engines share them: raise it"
        )


Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class RequestedDevice:
    """gpu: the pool's type of accelerator."""

    device: Literal["auto", "cpu", "cuda"]
    gpu: str
    pool: str

    @property
    def kind(self) -> Kind:
        """`auto` is cuda where the pool has an accelerator, else cpu."""
        if self.device == "auto":
            return "cpu" if self.gpu == NO_ACCELERATOR else "cuda"
        return self.device

    def __str__(self) -> str:
        how = f"engine.device: {self.device} with gpu: {self.gpu}"
        return f"pool {self.pool} asks for {self.kind} ({how})"


def requested_device(config: WorkerConfig) -> RequestedDevice:
    return RequestedDevice(config.engine.device, config.gpu, config.pool)


def check_gpu(requested: RequestedDevice, count: Callable[[], int] | None = None) -> None:
    """Raise DeviceError where cuda is requested and the driver shows no GPU."""
    if requested.kind == "cuda" and (count or count_gpus)() == 0:
        fix = (
            "check the node's driver and device plugin, and that the pod requests an accelerator, "
            "use a pool with gpu: cpu, or set engine.device: cpu, which leaves the accelerators "
            "idle"
        )
        raise DeviceError(f"{requested}, but no CUDA device is visible: {fix}")


@dataclass(frozen=True, slots=True)
class EngineRank:
    """board: descriptor of the engines' shared memory; None = none."""

    rank: int = 0
    board: int | None = None


def share_of(config: WorkerConfig, rank: int) -> WorkerConfig:
    if config.engine.data_parallel_size == 1:
        return config
    kv = config.listen.kv
    listen = msgspec.structs.replace(
        config.listen, kv=kv + rank * config.engine.num_kv_ports if kv else 0
    )
    return msgspec.structs.replace(config, engine=_share(config.engine), listen=listen)


def has_board(engine: EngineConfig) -> bool:
    """Return whether the engines of a worker share state."""
    delayer = engine.prefill_delayer
    return engine.data_parallel_size > 1 and delayer is not None and delayer.enabled


def thread_share(engine: EngineConfig) -> int:
    """CPU threads of each engine; 0 = from the machine."""
    size = engine.data_parallel_size
    return engine.threads if size == 1 else max(1, (engine.threads or available_threads()) // size)


def _share(engine: EngineConfig) -> EngineConfig:
    size = engine.data_parallel_size
    memory_share, num_blocks = engine.device_memory_share, engine.num_blocks
    return msgspec.structs.replace(
        engine,
        threads=thread_share(engine),
        kv_cache_memory=max(1, engine.kv_cache_memory // size),
        num_blocks=None if num_blocks is None else num_blocks // size,
        kv_tiers=engine.kv_tiers
        and tuple(
            tier
            if tier.type == "shared"  # of all workers together
            else msgspec.structs.replace(tier, size=max(1, tier.size // size))
            for tier in engine.kv_tiers
        ),
        device_memory_share=None if memory_share is None else memory_share / size,
        # 0 would be no limit at all.
        transfer_bandwidth=max(1, engine.transfer_bandwidth // size)
        if engine.transfer_bandwidth
        else 0,
    )
