"""The one run of the `cuda` operations on a GPU: correctness, then times beside what the device can
do and beside other kernels; each part writes JSON, and one that fails stops no other.

    gpu_run.py [--out FOLDER] [--parts cases steps ...] [--pack FOLDER] [--rehearse]

Parts are the programs of scripts/gpu.  Those that only check run side by side, those
that measure one after another.  --pack: what `make gpu-pack` fills, tiny models and
other kernels.  --rehearse: tiny sizes, on a CPU, in Triton's interpreter.
Exits 2 where there is no GPU, 1 where a part failed.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PARTS = ROOT / "scripts" / "gpu"


@dataclass(frozen=True)
class Part:
    """A program of scripts/gpu.  seconds: after which it is ended."""

    name: str
    seconds: int
    measures: bool = True


ALL = (
    Part("cases", 200, measures=False),
    Part("tokens", 150, measures=False),
    Part("logits", 150, measures=False),
    Part("steps", 150),
    Part("engine", 120),
    Part("sampling", 60),
    Part("transfer", 100),
    Part("servers", 240),
    Part("attention", 120),
    Part("kernels", 60),
)


@dataclass
class Started:
    """A part that runs."""

    part: Part
    process: "subprocess.Popen[bytes]"
    began: float


def main() -> int:
    """Run the parts; returns the exit status."""
    options = _options()
    if not options.rehearse and not torch.cuda.is_available():
        print("no GPU here: torch finds no CUDA device, so nothing was run")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    parts = [part for part in ALL if not options.parts or part.name in options.parts]
    report: dict[str, Any] = {"machine": _machine(), "parts": {}}
    _unpack(options)
    side_by_side = [_start(part, options) for part in parts if not part.measures]
    for started in side_by_side:
        _finish(started, options, report)
    for part in parts:
        if part.measures:
            _finish(_start(part, options), options, report)
    failed = [name for name, found in report["parts"].items() if found["status"] != 0]
    print(f"failed: {', '.join(failed)}" if failed else "all parts passed", flush=True)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "run" / "gpu")
    parser.add_argument("--parts", nargs="+", default=[], choices=[part.name for part in ALL])
    parser.add_argument("--pack", type=Path, default=ROOT / ".gpu")
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    options.out, options.pack = options.out.resolve(), options.pack.resolve()
    return options


def _machine() -> dict[str, Any]:
    names = ["cpu"]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "devices": names,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cpus": os.cpu_count(),
    }


def _unpack(options: argparse.Namespace) -> None:
    """The pack's wheels and libraries into a folder of this run."""
    for wheel in (options.pack / "wheels").glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(options.out / "site")
    for archive in options.pack.glob("*.tar.xz"):
        with tarfile.open(archive) as packed:
            packed.extractall(options.out / "site", filter="data")


def _start(part: Part, options: argparse.Namespace) -> Started:
    others = os.environ.get("PYTHONPATH", "")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(
            [
                *(str(ROOT / part / "src") for part in ("schema", "worker")),
                str(ROOT),
                str(options.out / "site"),
                others,
            ]
        ),
        "PYTHONUNBUFFERED": "1",
        "PDCLUSTER_GPU_PACK": str(options.pack),
        "PDCLUSTER_GPU_SITE": str(options.out / "site"),
    }
    if options.rehearse:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    figures = options.out / f"{part.name}.json"
    figures.unlink(missing_ok=True)
    with (options.out / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(PARTS / f"{part.name}.py"), str(figures)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Started(part, process, time.monotonic())


def _finish(started: Started, options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Wait for a part, print the end of its output, and write the report so far."""
    part, limit = started.part, started.began + started.part.seconds
    try:
        status = started.process.wait(max(1.0, limit - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(started.process.pid, 9)
        status = started.process.wait()
    seconds = time.monotonic() - started.began
    log = (options.out / f"{part.name}.log").read_text(errors="replace")
    figures = options.out / f"{part.name}.json"
    report["parts"][part.name] = {
        "status": status,
        "seconds": round(seconds, 1),
        "figures": json.loads(figures.read_text()) if figures.exists() else None,
    }
    verdict = "ok" if status == 0 else f"FAILED ({status})"
    print(f"== {part.name}: {verdict}, {seconds:.0f} s\n{log[-2500:]}", flush=True)
    (options.out / "report.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    sys.exit(main())
