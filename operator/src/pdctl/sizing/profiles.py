"""Profiles of a model's workers on each GPU type, and what the tables lack, as notes."""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pdcluster_api.errors import StartError
from pdcluster_schema.accelerators import accelerators, gpus_per_node
from pdctl.sizing import tables
from pdctl.sizing.layouts import layouts_of, uneven_notes
from pdctl.sizing.manifest import PlannedModel
from pdctl.sizing.objective import Objective
from pdctl.sizing.profile import EngineProfile, RankLayout
from pdctl.sizing.roofline import SOURCE, roofline_profile, sequence_kv_bytes
from pdctl.sizing.shape import read_shape

LINK_BYTES = 50e9  # where the table has none: a network card of 400 Gbit/s for each GPU


def slo_fault(message: str) -> StartError:
    return StartError(message, exit_code=2)


class ModelProfiles:
    """From the tables where they know model and type, else by our roofline, which a note says."""

    def __init__(self, model: str, engine: str, goal: Objective, gpus: Mapping[str, int]) -> None:
        self.notes: list[str] = []
        self._goal, self._gpus = goal, gpus
        self._with_data = engine == "vllm"  # PDCluster gives a worker of sglang one engine
        self._tables = self._known(model, engine)
        self._shape = self._tables.shape if self._tables else read_shape(Path(model))
        self._check_context()
        self._unfit: list[str] = []
        if unknown := [gpu for gpu in gpus if accelerators()[gpu].network_bytes is None]:
            self.notes.append(
                f"{', '.join(unknown)}: the network is not known; taken as {LINK_BYTES / 1e9:g} "
                "GB/s for each GPU."
            )

    @property
    def prompt_kv_bytes(self) -> float:
        """KV of the prompt that TTFT is of."""
        return self._kv_bytes(round(self._goal.long_prompt(0).tokens))

    def _check_context(self) -> None:
        longest, most = self._goal.longest_tokens, self._shape.max_length
        if not most or longest <= most:
            return
        if self._goal.lengths:
            what, fix = "--trace: its longest request has", "leave such requests out of the trace"
        else:
            what, fix = "--input and --output: together have", "give fewer"
        raise slo_fault(
            f"{what} {longest} tokens, and the model takes {most} (max_position_embeddings); "
            f"{fix}, or plan a model with a longer context"
        )

    def _kv_bytes(self, num_tokens: int) -> float:
        if self._tables and self._tables.kv_bytes:
            return self._tables.sequence_kv_bytes(num_tokens)
        return sequence_kv_bytes(self._shape, num_tokens)

    def planned(self, folder: str, engine: str) -> PlannedModel:
        has_fp8_kv = self._tables is not None and self._tables.has_fp8_kv
        return PlannedModel(folder, engine, has_fp8_kv, self._shape.max_length)

    def _known(self, model: str, engine: str) -> tables.SiliconTables | None:
        """None = by roofline."""
        is_folder = Path(model).is_dir()
        if is_folder:
            read_shape(Path(model))
        if not tables.is_installed():
            if not is_folder:
                raise slo_fault(
                    f"--model {model}: names are of the tables of {tables.PACKAGE}, which is not "
                    f"installed: {tables.INSTALL}; or give the model's folder, for our roofline"
                )
            self.notes.append(f"Measured tables are not installed: {tables.INSTALL}.")
            return None
        if is_folder:
            return tables.SiliconTables(model, engine)
        known, short = tables.known_models(), tables.short_name(model)
        if short not in known:
            near = difflib.get_close_matches(short, known, 1, 0.0)[0]
            raise slo_fault(
                f"--model {model}: no table knows it; the nearest is {near} ({known[near]}); or "
                "give the folder with its config.json, which our roofline serves"
            )
        if tables.short_name(known[short]) != short:
            self.notes.append(f"{model} is taken for {known[short]}, which has its shape.")
        return tables.SiliconTables(known[short], engine)

    @property
    def num_layouts(self) -> int:
        return sum(len(self._layouts(gpu)) for gpu in self._gpus)

    def _layouts(self, gpu: str) -> list[RankLayout]:
        return layouts_of(self._shape, self._most(gpu), with_data=self._with_data)

    def all(self, on_layout: Callable[[], None]) -> list[EngineProfile]:
        """Raises StartError where no worker holds the model.  on_layout: after each of a type"""
        found: list[EngineProfile] = []
        for gpu in self._gpus:
            found += self._of(gpu, on_layout)
        if self._tables:
            for hole, where in self._tables.holes.items():
                self.notes.append(f"Hole in the tables: {', '.join(where)}: {hole.rstrip('.')}.")
            self._unfit += self._tables.unfit
            self.notes += self._measured_notes()
        self.notes += uneven_notes(self._shape, max(map(self._most, self._gpus)))
        if not found:
            raise self._does_not_fit()
        if self._unfit:
            self.notes.append(f"Too large for one worker's memory: {', '.join(self._unfit)}.")
        return found

    def _measured_notes(self) -> Iterator[str]:
        measured = self._tables.measured if self._tables else {}
        if shares := [f"{name} {share:.0%}" for name, share in measured.items()]:
            yield (
                f"Share of a step's time from kernels measured for this very shape: "
                f"{', '.join(shares)}; the package interpolates or derives the rest."
            )

    def _most(self, gpu: str) -> int:
        """Ranks of one worker."""
        return min(self._gpus[gpu], gpus_per_node(gpu))

    @property
    def _request_bytes(self) -> float:
        return self._kv_bytes(self._goal.longest_tokens)

    def _of(self, gpu: str, on_layout: Callable[[], None]) -> list[EngineProfile]:
        layouts = self._layouts(gpu)
        if self._tables and gpu in tables.SYSTEMS:
            found = self._tables.profiles(gpu, layouts, self._goal, on_layout)
            without = [each for each in self._tables.unfit if each.startswith(f"{gpu} ")]
            if found or len(without) == len(layouts):
                return found
            on_layout = _nothing  # all were counted
        if self._tables:
            self.notes.append(f"{gpu}: the tables have no step of this model; taken from {SOURCE}.")
        if not self._shape.kv.is_known:
            raise slo_fault(
                f"--model: {gpu} would be taken from {SOURCE}, which does not know the cache of "
                "this model; leave the type out, or give a model whose layers keep plain KV"
            )
        found = []
        for layout in layouts:
            profile = roofline_profile(gpu, accelerators()[gpu], layout, self._shape, self._goal)
            if profile is None:
                self._unfit.append(f"{gpu} {layout}")
            else:
                found.append(profile)
            on_layout()
        return found

    def _does_not_fit(self) -> StartError:
        weights = self._shape.weights * self._shape.weight_bytes
        memory = {gpu: accelerators()[gpu].memory_bytes or 1 for gpu in self._gpus}
        gpu = max(memory, key=lambda name: memory[name])
        if any(weights < tables.MEMORY_SHARE * memory[each] * self._most(each) for each in memory):
            name = "--trace" if self._goal.lengths else "--input"
            return slo_fault(
                f"{name}: no worker holds the weights, {weights / 1e9:.0f} GB, and the KV of one "
                f"request, {self._request_bytes / 1e9:.3g} GB, on {counted(self._gpus)}; give "
                "fewer tokens, or more GPUs for a worker"
            )
        needed = 1 << math.ceil(math.log2(weights / (tables.MEMORY_SHARE * memory[gpu])))
        return slo_fault(
            f"--gpu: no worker holds the model: its weights are {weights / 1e9:.0f} GB, and "
            f"{counted(self._gpus)} have {memory[gpu] / 1e9:.0f} GB each at most; a worker of "
            f"{max(2, needed)} {gpu} would hold them, or weights of fewer bits"
        )


def _nothing() -> None:
    pass


def counted(gpus: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {gpu}" for gpu, number in gpus.items())
