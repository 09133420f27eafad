"""`pdctl plan --slo` beside AIConfigurator's own search: six models on three systems.

    bench/planning.py [--peer PYTHON] [--answers FILE] [--log]

PYTHON has `aiconfigurator` of the same version as our `aiconfigurator-core` (a venv of its own).
Answers of both are kept in FILE as JSON lines, and what is there is not computed again.  Both
read the same tables, so what differs is the search and the model of queues; neither is a
measurement of a cluster.  A minute or two of one core a case, no GPU.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layout import table
from setting import LOG_HELP, keep_report, setting_lines

from pdcluster_schema.accelerators import accelerators
from pdctl.sizing.layouts import layouts_of
from pdctl.sizing.objective import Objective
from pdctl.sizing.search import SearchInput, best, placements
from pdctl.sizing.tables import SYSTEMS, SiliconTables

MODELS = (
    "nvidia/Llama-3.1-70B-Instruct-FP8",
    "meta-llama/Meta-Llama-3.1-8B",
    "Qwen/Qwen3-32B-FP8",
    "openai/gpt-oss-120b",
    "deepseek-ai/DeepSeek-R1",
    "Qwen/Qwen3-235B-A22B-FP8",
)
GPUS = ("B200", "H200", "B300")
GOAL = Objective(6000, 400, ttft_seconds=2.0, itl_seconds=0.05)
NUMBER, ENGINE = 32, "vllm"
PEER = Path(__file__).parent / "peers" / "aiconfigurator_plan.py"
KINDS = {"agg": "aggregated", "disagg": "split"}


@dataclass(frozen=True)
class PlanningCase:
    model: str
    gpu: str


def our_answer(case: PlanningCase) -> dict[str, Any]:
    """Tokens per second and GPU of the best of each kind, and the holes with their layouts."""
    tables = SiliconTables(case.model, ENGINE)
    profiles = tables.profiles(case.gpu, layouts_of(tables.shape, 8), GOAL)
    prompt_bytes = tables.sequence_kv_bytes(GOAL.input_tokens)
    links = {case.gpu: float(accelerators()[case.gpu].network_bytes or 0)}
    given = SearchInput(GOAL, {case.gpu: NUMBER}, links, prompt_bytes)
    found = placements(profiles, given)
    holes = [f"{', '.join(where)}: {hole}" for hole, where in tables.holes.items()]
    answer: dict[str, Any] = {"holes": holes}
    for name, kind in KINDS.items():
        ranked = [one for one in best(found, given) if one.kind == kind]
        if ranked:
            answer[name] = ranked[0].per_gpu
    return answer


def peer_answer(case: PlanningCase, python: Path) -> dict[str, Any]:
    lengths = [str(NUMBER), str(GOAL.input_tokens), str(GOAL.output_tokens)]
    limits = [str(GOAL.ttft_seconds), str(GOAL.itl_seconds)]
    command = [str(python), str(PEER), case.model, SYSTEMS[case.gpu], ENGINE, *lengths, *limits]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def answers(file: Path, python: Path | None) -> Iterator[tuple[PlanningCase, Any, Any]]:
    """Ours and the peer's of each case; None = not computed."""
    lines = file.read_text().splitlines() if file.exists() else []
    kept = {(one["by"], one["model"], one["gpu"]): one["answer"] for one in map(json.loads, lines)}

    def answer(by: str, case: PlanningCase) -> Any:
        key = (by, case.model, case.gpu)
        if by == "ours" and key not in kept:
            kept[key] = our_answer(case)
        elif python is not None and key not in kept:
            kept[key] = peer_answer(case, python)
        else:
            return kept.get(key)
        with file.open("a") as out:
            out.write(json.dumps({"by": by, **asdict(case), "answer": kept[key]}) + "\n")
        return kept[key]

    for case in (PlanningCase(model, gpu) for model in MODELS for gpu in GPUS):
        yield case, answer("ours", case), answer("peer", case)


def row(case: PlanningCase, ours: Any, peer: Any) -> list[str]:
    cells = [case.model.rpartition("/")[2], case.gpu]
    for name in KINDS:
        own = (ours or {}).get(name)
        other = None if peer is None else (peer.get(name) or {}).get("tokens/s/gpu")
        error = f"{own / other - 1:+.0%}" if own and other else "-"
        cells += [_figure(own, ours), _figure(other, peer), error]
    return cells


def hole_lines(case: PlanningCase, ours: Any, peer: Any) -> Iterator[str]:
    name = case.model.rpartition("/")[2]
    for hole in (ours or {}).get("holes", []):
        yield f"- Hole, ours, {name}, {hole}"
    if hole := (peer or {}).get("hole"):
        yield f"- Hole, peer, {name} on {case.gpu}: {hole}"


def _figure(value: float | None, answer: Any) -> str:
    if answer is None:
        return "not run"
    if "hole" in answer:
        return "hole"
    return "none" if value is None else f"{value:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--peer", type=Path, metavar="PYTHON")
    parser.add_argument("--answers", type=Path, default=Path("planning.jsonl"))
    parser.add_argument("--log", action="store_true", help=LOG_HELP)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    found = list(answers(options.answers, options.peer))
    header = ["model", "GPU"]
    header += [
        f"{kind}{of}" for kind in KINDS.values() for of in (", ours", ", peer", ", difference")
    ]
    holes = [line for each in found for line in hole_lines(*each)]
    text = [
        f"Tokens per second and GPU, {NUMBER} GPUs, {ENGINE}, {GOAL.input_tokens} tokens in, "
        f"{GOAL.output_tokens} out, mean TTFT <= {GOAL.ttft_seconds:g} s, mean ITL <= "
        f"{GOAL.itl_seconds:g} s; none = no placement within both; hole = no "
        "answer, for the reason below.",
        "",
        table(header, [row(*each) for each in found]),
        "",
        *holes,
        "",
        *setting_lines("bench/planning.py", "", load),
    ]
    report = "\n".join(text)
    sys.stdout.write(report + "\n")
    if options.log:
        keep_report(report)


if __name__ == "__main__":
    main()
