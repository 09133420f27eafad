"""Profiles from aiconfigurator-core: kernels measured by NVIDIA, for systems and engines' versions.

Offline.  What its tables do not have is a hole, which is returned and never filled.
"""

import importlib.util
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from pdcluster_schema.text import shortened
from pdctl.sizing.objective import Objective
from pdctl.sizing.profile import (
    DECODE_BUDGET,
    EngineProfile,
    PromptScatter,
    RankLayout,
    prefill_budget,
    prompt_scatter,
)
from pdctl.sizing.shape import TransformerShape, read_shape, shape_of

PACKAGE = "aiconfigurator-core"
INSTALL = "pip install 'pdcluster[plan]'"
SYSTEMS: Mapping[str, str] = {
    "B200": "b200_sxm",
    "B300": "b300_sxm",
    "GB200": "gb200",
    "GB300": "gb300",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
}
_OF_EQUAL_SHAPE = {
    "llama-3.3-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.3-70b-fp8": "nvidia/Llama-3.1-70B-Instruct-FP8",
    "llama-3.3-70b-fp8-dynamic": "nvidia/Llama-3.1-70B-Instruct-FP8",
    "deepseek-r1-0528": "deepseek-ai/DeepSeek-R1",
}
_BLACKWELL = ("B200", "B300", "GB200", "GB300")
_BLOCK_FP8 = (
    "FP8 in blocks on Blackwell is too slow in these tables, 2.3 to 2.4 times beside measured runs "
    "of MiniMax-M2.5 (vLLM, B200, B300; others were not compared): do not plan by it"
)
PROMPTS = (1, 2, 4, 8)
STREAMS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512)
BUDGETS = (512, 1024, 2048, 4096, 8192, 16384)
MAX_PROMPT_TOKENS = 32768  # of prompts that are prefilled at once
_NO_KV = "no KV budget"  # of the package's error
_HOLE_LENGTH = 160  # characters
_Key = TypeVar("_Key")
MEMORY_SHARE = 0.9  # deviceMemoryShare, of which weights and activations are a part


def is_installed() -> bool:
    return importlib.util.find_spec("aiconfigurator_core") is not None


def source_name(engine: str, found: str) -> str:
    """The source of a profile, as the output names it."""
    return f"{PACKAGE} {version(PACKAGE)}, {found}, {engine}"


def known_models() -> dict[str, str]:
    """Name in the tables by the short one that users write."""
    from aiconfigurator_core.sdk.common import DefaultHFModels

    names = {short_name(name): name for name in sorted(DefaultHFModels)}
    return {**names, **_OF_EQUAL_SHAPE}


def short_name(name: str) -> str:
    """
    >>> short_name("meta-llama/Meta-Llama-3.1-70B"), short_name("Llama-3.1-70B-Instruct")
    ('llama-3.1-70b', 'llama-3.1-70b')
    """
    return name.rpartition("/")[2].lower().removeprefix("meta-").replace("-instruct", "")


@dataclass(frozen=True)
class _Target:
    gpu: str
    layout: RankLayout
    objective: Objective


@dataclass
class SiliconTables:
    """model: a name of `known_models`, or a folder with a config.json.

    holes: what the tables lack, with the types and layouts; unfit: layouts beyond the memory;
    kv_bytes: of one token on all ranks together.
    """

    model: str
    engine: str
    holes: dict[str, list[str]] = field(default_factory=dict)
    unfit: list[str] = field(default_factory=list)
    kv_bytes: float = 0.0
    measured: dict[str, float] = field(default_factory=dict)
    """Share of a step's time that is from measured kernels, by GPU type and role."""

    def __post_init__(self) -> None:
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)

    @cached_property
    def shape(self) -> TransformerShape:
        """Raises StartError."""
        if (folder := Path(self.model)).is_dir():
            return read_shape(folder)
        from aiconfigurator_core.sdk.utils import get_model_config_from_model_path

        raw = get_model_config_from_model_path(self.model)["raw_config"]
        return shape_of(raw, self.model)

    @property
    def has_fp8_kv(self) -> bool:
        return 0.0 < self.kv_bytes < 1.5 * self.shape.kv.values(1)

    def sequence_kv_bytes(self, num_tokens: int) -> float:
        """KV of a sequence, by the package where its shape is not known here."""
        if not self.shape.kv.is_known:
            return self.kv_bytes * num_tokens
        return (1.0 if self.has_fp8_kv else 2.0) * self.shape.kv.values(num_tokens)

    def profiles(
        self,
        gpu: str,
        layouts: list[RankLayout],
        objective: Objective,
        on_layout: Callable[[], None] = lambda: None,
    ) -> list[EngineProfile]:
        """Those of the layouts that the tables have.  on_layout: after each"""
        found = []
        for layout in layouts:
            found.append(self._profile(_Target(gpu, layout, objective)))
            on_layout()
        return [each for each in found if each is not None]

    def _database(self, gpu: str) -> Any:
        from aiconfigurator_core.sdk.perf_database import get_database

        return get_database(SYSTEMS[gpu], self.engine, "current")

    def _profile(self, target: _Target) -> EngineProfile | None:
        """None after a hole."""
        errors = _package_errors()
        for modes in ({}, {"fmha_quant_mode": "bfloat16"}):
            try:
                kv_tokens = self._kv_tokens(target, modes)
                least = min(kv_tokens.values())
                handle = self._compiled(target, modes)
                goal = target.objective
                handle.predict_prefill_latency(1, goal.input_tokens)
                handle.decode_step_latency(1, goal.input_tokens, max(2, goal.output_tokens))
                scatter = prompt_scatter(goal, least, partial(_prompt_seconds, handle))
                self._measure(handle, target)
            except errors as e:
                fault = _first_line(e)
                if _NO_KV in fault:
                    self.unfit.append(f"{target.gpu} {target.layout}")
                    return None
                continue
            if modes:
                self._note("no attention in FP8, so it is taken in BF16", target)
            return self._filled(handle, target, kv_tokens, scatter)
        self._note(fault, target)
        return None

    def _note(self, hole: str, target: _Target) -> None:
        where, name = self.holes.setdefault(hole, []), f"{target.gpu} {target.layout}"
        if name not in where:
            where.append(name)

    def _sizes(self, layout: RankLayout) -> dict[str, Any]:
        experts = layout.gpus if layout.is_expert_parallel else 1
        sizes: dict[str, Any] = {"tp_size": layout.tensor, "attention_dp_size": layout.data}
        if self.shape.experts:
            sizes |= {"moe_tp_size": layout.gpus // experts, "moe_ep_size": experts}
        return sizes

    def _compiled(self, target: _Target, modes: Mapping[str, Any]) -> Any:
        from aiconfigurator_core.sdk import EngineHandle

        return EngineHandle.compile(
            self.model,
            SYSTEMS[target.gpu],
            self.engine,
            backend_version="current",
            **self._sizes(target.layout),
            **modes,
        )

    def _kv_tokens(self, target: _Target, modes: Mapping[str, Any]) -> dict[float, int]:
        """By maxBatchedTokens, whose activations lie beside it, where a request has room.

        Raises ValueError where there is none.
        """
        goal, found = target.objective, dict[float, int]()
        prefills = (prefill_budget(n, goal.input_tokens) for n in _prompt_counts(goal))
        for budget in sorted({*BUDGETS, *prefills}):
            try:
                estimate = self._kv_estimate(target, modes, budget)
            except ValueError as e:
                if found and _NO_KV in str(e):
                    break
                raise
            if (tokens := int(estimate["total_kv_size_tokens"])) < goal.longest_tokens:
                break
            found[budget] = tokens
            of_rank = float(estimate["kv_size_per_token_bytes"])
            share = self.shape.kv.share(target.layout.tensor)
            self.kv_bytes = max(self.kv_bytes, of_rank / share)
        if not found:
            raise ValueError(f"{_NO_KV} for one request")
        return found

    def _kv_estimate(self, target: _Target, modes: Mapping[str, Any], budget: int) -> Any:
        from aiconfigurator_core.sdk import estimate_kv_cache

        return estimate_kv_cache(
            self.model,
            SYSTEMS[target.gpu],
            self.engine,
            "current",
            max_num_tokens=budget,
            max_batch_size=STREAMS[-1],  # of no effect on it
            memory_fraction_kind="of_total",
            memory_fraction_value=MEMORY_SHARE,
            **self._sizes(target.layout),
            **modes,
        )

    def _filled(
        self,
        handle: Any,
        target: _Target,
        kv_tokens: Mapping[float, int],
        scatter: PromptScatter,
    ) -> EngineProfile:
        goal, cached = target.objective, round(scatter.cached_tokens)
        lengths = (goal.stream[0], max(2, goal.stream[1]))

        def prefill(prompts: int) -> float:
            mean = float(handle.predict_prefill_latency(prompts, goal.input_tokens, cached))
            return mean + 1e3 * prompts * scatter.uneven_seconds

        def decode(streams: int) -> float:
            return float(handle.decode_step_latency(streams, *lengths))

        def mixed(key: tuple[int, int]) -> float:
            return float(handle.mixed_step_latency(key[0] - key[1], key[1], *lengths))

        def held(budget: int) -> list[int]:
            most = kv_tokens.get(budget, 0) // sum(goal.stream)
            return [n for n in STREAMS if n <= most]

        streams = held(DECODE_BUDGET) or [1]
        both = [(budget, n) for budget in BUDGETS for n in held(budget)]
        engine = f"{self.engine} {self._database(target.gpu).version}"
        return EngineProfile(
            gpu=target.gpu,
            layout=target.layout,
            prefill=dict(self._points(prefill, _prompt_counts(goal), target, "prefill")),
            decode=dict(self._points(decode, streams, target, "decode")),
            mixed=dict(self._points(mixed, both, target, "mixed")),
            kv_tokens=kv_tokens,
            source=source_name(engine, SYSTEMS[target.gpu]),
            warning=_BLOCK_FP8 if self.shape.is_block_fp8 and target.gpu in _BLACKWELL else "",
            scatter=scatter,
        )

    def _points(
        self, seconds: Callable[[_Key], float], keys: list[_Key], target: _Target, what: str
    ) -> Iterator[tuple[_Key, float]]:
        for key in keys:
            try:
                yield key, seconds(key) / 1e3
            except _package_errors() as e:
                self._note(f"{what} of {key}: {_first_line(e)}", target)

    def _measure(self, handle: Any, target: _Target) -> None:
        """Keep the least share of all layouts."""
        goal = target.objective
        both = handle.run_static_per_op(
            batch_size=1, isl=goal.input_tokens, osl=max(2, goal.output_tokens)
        )
        for role, operations in zip(("prefill", "decode"), both, strict=True):
            total = sum(each[1] for each in operations) or 1.0
            share = sum(each[1] for each in operations if each[3] == "silicon") / total
            name = f"{target.gpu} {role}"
            self.measured[name] = min(share, self.measured.get(name, 1.0))


def _prompt_counts(goal: Objective) -> list[int]:
    """Prompts that are prefilled at once."""
    return [n for n in PROMPTS if n == 1 or n * goal.input_tokens <= MAX_PROMPT_TOKENS]


def _prompt_seconds(handle: Any, tokens: int, cached: int) -> float:
    return float(handle.predict_prefill_latency(1, tokens, cached)) / 1e3


def _package_errors() -> tuple[type[Exception], ...]:
    """Errors of the package for a layout, a type or a point that its tables do not have."""
    from aiconfigurator_core.sdk import errors

    return (
        ValueError,
        errors.PerfDataNotAvailableError,
        errors.EmpiricalNotImplementedError,
        errors.SolNotImplementedError,
    )


def _first_line(error: Exception) -> str:
    """Without the path of the package's files, and without what the layout says already."""
    line = str(error).partition("\n")[0].partition(" at /")[0].strip()
    line = re.sub(r"^unsupported model/.* gpu_sku=\S+: ", "", line)
    return shortened(line or type(error).__name__, _HOLE_LENGTH)
