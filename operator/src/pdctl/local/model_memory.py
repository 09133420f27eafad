"""Memory that a model's weights and the KV of its requests take, by its folder on this machine.

Everything is counted for less than it takes, and memory of a step not at all: what is refused here
cannot start, and what passes is judged by the worker.
"""

import json
from bisect import bisect_right
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdcluster_api.manifests.model_source import hub_folder
from pdcluster_schema.accelerators import accelerators_text
from pdcluster_schema.faults import Fault, InvalidObjectError
from pdcluster_schema.kv_shape import KVShape, language_config
from pdcluster_schema.pdcluster import PDCluster, PDClusterSpec
from pdcluster_schema.sections import PoolSpec
from pdcluster_schema.stock_engine import VLLM
from pdcluster_schema.stock_rules import precision_of, weight_only_pools
from pdcluster_schema.vllm_flags import flags_of
from pdctl.local.model import cached_model, default_cache_dir, own_path

LEAST_TOKENS: Final = 64  # our engine lowers a model's own length, but not below this
_SHARES: Final = {"pdcluster": 1.0, "vllm": 0.92, "sglang": 1.0}  # where none is given
_OTHER_MODEL: Final = frozenset(
    {
        *("hf-overrides", "json-model-override-args", "cpu-offload-gb", "offload-backend"),
        *("offload-group-size", "offload-num-in-group", "cpu-offload-params"),
    }
)
"""Flags with which the folder alone does not say what a GPU holds."""
_EXPERTS: Final = ("n_routed_experts", "num_local_experts", "num_experts")
_WIDE: Final = ("float32", "")  # a folder that names none may have either


@dataclass(frozen=True)
class ModelFolder:
    """num_bytes: of the weights' files, 0 = none are there; longest: tokens, 0 = not said."""

    folder: Path
    shape: KVShape
    num_bytes: int
    longest: int
    dtype: str
    is_quantized: bool
    has_small_kv: bool
    has_experts: bool


def local_folder(cluster: PDCluster, source: Path) -> Path | None:
    """The model's folder where it is on this machine already.  source: the object's file."""
    model = cluster.spec.model
    own, hub = own_path(model, source), model.hugging_face
    places = [own, cached_model(model)]
    if hub is not None:
        places.append(default_cache_dir() / "models" / hub_folder(hub))
    with suppress(OSError):
        return next((each for each in places if each and (each / "config.json").is_file()), None)
    return None


def read_folder(folder: Path) -> ModelFolder | None:
    """None where config.json does not say what KV the model keeps."""
    try:
        config = language_config(json.loads((folder / "config.json").read_bytes()))
        shape, quantization = KVShape.of(config), config.get("quantization_config") or {}
        longest = config.get("max_position_embeddings")
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    if not shape.is_known:
        return None
    small = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    return ModelFolder(
        folder=folder,
        shape=shape,
        num_bytes=_weight_bytes(folder),
        longest=longest if isinstance(longest, int) else 0,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        is_quantized=bool(quantization),
        has_small_kv=bool(small),
        has_experts=any(config.get(name) for name in _EXPERTS),
    )


def _weight_bytes(folder: Path) -> int:
    """Bytes of one set of weights: some folders hold the same twice, in other files."""
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin"):
        files = filter(Path.is_file, folder.glob(pattern))  # not links that lead nowhere
        if found := sum(path.stat().st_size for path in files):
            return found
    return 0


def check_memory(cluster: PDCluster, folder: Path | None) -> list[Fault]:
    """Warnings of what fits in part.  folder: of the model, None = it is not here.

    Raises InvalidObjectError for what cannot start.
    """
    model = None if folder is None else read_folder(folder)
    errors, warnings = ([], []) if model is None else memory_faults(cluster, model)
    if errors:
        raise InvalidObjectError(errors)
    found = weight_only_pools(cluster.spec)
    return [*(Fault(f"spec.{place}", text, "nothing to do") for place, text in found), *warnings]


def memory_faults(cluster: PDCluster, model: ModelFolder) -> tuple[list[Fault], list[Fault]]:
    """Pools that hold no request of the length asked for, and those that hold fewer than
    maxSequences of them.
    """
    errors, warnings = [], []
    for role, declared in cluster.spec.roles.computing().items():
        for index, pool in enumerate(declared.pools):
            fit = _PoolFit(cluster.spec, role, index, pool, model)
            if fit.is_judged and (fault := fit.error()) is not None:
                errors.append(fault)
            elif fit.is_judged and (fault := fit.warning()) is not None:
                warnings.append(fault)
    return errors, warnings


class _PoolFit:
    """Bytes of one accelerator of a pool, or of one worker's KV where that is bounded by itself."""

    def __init__(
        self, spec: PDClusterSpec, role: str, index: int, pool: PoolSpec, model: ModelFolder
    ) -> None:
        self._spec, self._role, self._index, self._pool = spec, role, index, pool
        self._given, self._model = spec.engine_of(role), model
        self._engine = engine = self._given.sized_for(pool.gpu)
        self._flags = {flag.name: flag.value for flag in flags_of(engine.args or ())}
        self._engines = self._num_engines(spec.pods_per_replica(role, pool))
        memory = spec.hardware(pool.gpu).memory_bytes
        on_device = engine.computes_on(pool.gpu) and memory is not None
        share = engine.device_memory_share or _SHARES[engine.type]
        self._memory = int(share * (memory or 0)) if on_device else None
        self._weights = self._weights_of_rank() if on_device else 0
        self._limit = self._kv_limit()
        unknown = engine.is_stock and self._flags.keys() & _OTHER_MODEL
        self.is_judged = self._limit is not None and not unknown

    def error(self) -> Fault | None:
        needed = self._length()
        if self.kv_bytes(needed) <= (self._limit or 0):
            return None
        largest = self._largest(needed)
        reason = (
            f"{self._request_text(needed)} {self._size(self.kv_bytes(needed))} of "
            f"KV{self._each()}, and {self._has()}"
        )
        return Fault(self._place(), reason, self._fix(largest))

    def warning(self) -> Fault | None:
        """The number that fits, where fewer than maxSequences of the full length do."""
        fields = self._given.model_fields_set
        length = self._engine.max_model_len or self._model.longest
        is_given = fields & {"max_sequences", "max_model_len"}
        is_sized = not self._engine.is_stock or "max_sequences" in fields
        if self._memory is None or not is_given or not is_sized or not length:
            return None
        length, most = min(length, self._model.longest or length), self._engine.max_sequences
        fitting = (self._limit or 0) // max(1, self.kv_bytes(length))
        if fitting >= most:
            return None
        reason = (
            f"has KV for {fitting} x {length} tokens, and maxSequences is {most}"
            f"{' for each engine' if self._engine.data_parallel_size > 1 else ''}: more requests "
            "of that length wait, or are preempted"
        )
        return Fault(self._pool_path(), reason, "nothing to do where requests are shorter")

    def kv_bytes(self, num_tokens: int) -> int:
        """KV of one request in one rank, with the block that our engine spares."""
        engine, shape = self._engine, self._model.shape
        size = engine.block_size
        tokens = num_tokens if engine.is_stock else size * (1 + -(-num_tokens // size))
        values = shape.values(tokens, by_layer=engine.is_stock)
        ranks = shape.share(engine.tensor_parallel_size) / engine.pipeline_parallel_size
        return int(values * ranks * self._kv_itemsize())

    def _length(self) -> int:
        given, own = self._engine.max_model_len, self._model.longest
        if given is not None:
            return min(given, own or given)
        return own if self._engine.type == VLLM and own else LEAST_TOKENS

    def _largest(self, needed: int) -> int:
        """Most tokens of one request; 0 = none."""
        limit = self._limit or 0
        return bisect_right(range(1, needed + 1), limit, key=self.kv_bytes)

    def _num_engines(self, pods: int) -> int:
        """Engines of ours on one accelerator; ranks of a stock engine have their own."""
        engine = self._engine
        return 1 if engine.is_stock else max(1, engine.data_parallel_size // pods)

    def _kv_limit(self) -> int | None:
        """Bytes for KV of one engine in one rank; None = not known."""
        engine, limits = self._engine, []
        is_given = "kv_cache_memory" in self._given.model_fields_set
        ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
        if engine.num_blocks is not None and not (engine.is_stock and self._model.shape.window):
            data = engine.data_parallel_size
            blocks = max(1, engine.num_blocks // data) + (1 if engine.is_stock else 0)
            limits.append(self.kv_bytes(max(1, (blocks - 1) * engine.block_size)))
        elif engine.num_blocks is None and (is_given or not engine.computes_on(self._pool.gpu)):
            of_engine = engine.kv_cache_memory // engine.data_parallel_size
            if engine.type != "sglang":
                limits.append(of_engine if engine.is_stock else of_engine * ranks)
        if self._memory is not None:
            limits.append(max(0, self._memory - self._engines * self._weights) // self._engines)
        return min(limits, default=None)

    def _weights_of_rank(self) -> int:
        engine, model = self._engine, self._model
        ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
        if engine.is_stock and model.has_experts:
            ranks *= engine.data_parallel_size
        factor = 1.0
        if not model.is_quantized:
            factor = self._itemsize() / (4 if model.dtype in _WIDE else 2)
            if engine.quantization != "none":
                factor *= 1 / self._itemsize()
            if engine.is_stock and self._flags.get("quantization"):
                factor *= 0.5 if precision_of(engine) == "fp8" else 0.25
        return int(model.num_bytes * factor / ranks)

    def _itemsize(self) -> int:
        """Bytes of a number of the model's dtype; auto is never counted as float32."""
        return 4 if self._spec.model.dtype == "float32" else 2

    def _kv_itemsize(self) -> float:
        own = self._engine.kv_cache_dtype
        if not self._engine.is_stock and own in ("int8", "fp8_e4m3"):
            return 1.0 + 4 / self._model.shape.head_dim  # a scale for each row
        if not self._engine.is_stock:
            return 2.0 if own == "bf16" else self._itemsize()
        kind = self._flags.get("kv-cache-dtype", "auto")
        if kind == "auto":
            return 1.0 if self._model.has_small_kv else self._itemsize()
        return 2.0 if kind in ("bfloat16", "float16", "bf16") else 0.5 if "4" in kind[:5] else 1.0

    def _request_text(self, needed: int) -> str:
        given = self._engine.max_model_len
        if given is not None and given <= (self._model.longest or given):
            return f"is {given}, and one request of that length takes"
        return f"one request of {needed} tokens takes"

    def _each(self) -> str:
        return " in each accelerator" if self._memory is not None else ""

    def _has(self) -> str:
        engine, name = self._engine, f"{self._role}/{self._pool.name}"
        limit = self._size(self._limit or 0)
        if self._memory is None:
            return f"workers of {name} have {limit} for it (by {self._model.folder})"
        number = self._spec.gpus_per_replica(self._role, self._pool)
        share = engine.device_memory_share or _SHARES[engine.type]
        return (
            f"{name} ({accelerators_text(self._pool.gpu, number)}) has {limit} for it: "
            f"{share:g} of its memory is {self._size(self._memory)}, and weights take "
            f"{self._size(self._weights * self._engines)} (by {self._model.folder})"
        )

    def _fix(self, largest: int) -> str:
        more = "raise engine.tensorParallelSize, or use accelerators with more memory"
        if self._engine.num_blocks is not None:
            more = "raise engine.numBlocks"
        elif "kv_cache_memory" in self._given.model_fields_set or self._memory is None:
            more = "raise engine.kvCacheMemory"
        return f"set engine.maxModelLen to at most {largest}, or {more}" if largest > 1 else more

    def _place(self) -> str:
        """The field that asks for the length, else the pool."""
        own = self._spec.roles.present()[self._role].engine
        if self._engine.max_model_len is None:
            return self._pool_path()
        of_role = f"spec.roles.{self._role}." if own.max_model_len is not None else "spec."
        return f"{of_role}engine.maxModelLen"

    def _pool_path(self) -> str:
        return f"spec.roles.{self._role}.pools[{self._index}].gpu"

    @staticmethod
    def _size(num_bytes: int) -> str:
        return f"{num_bytes / 1e9:.3g} GB"
