"""Conditions of a run in a report: command, commit, machine and versions."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import psutil

_ROOT = Path(__file__).parents[1]
_PACKAGES = ("torch", "transformers", "aiohttp")
RESULTS = _ROOT / "bench" / "results"
LOG_HELP = "append the report to this month's file in bench/results"


def keep_report(report: str) -> None:
    """Append a report to this month's results, as an entry; its author adds the conclusions."""
    keep_entry(log_entry(report))


def keep_entry(entry: str, folder: Path = RESULTS) -> None:
    """Append an entry, which opens with an empty line and its heading, to this month's results."""
    month = f"{datetime.now(UTC):%Y-%m}"
    file = folder / f"{month}.md"
    if not file.exists():
        file.write_text(
            f"# Benchmark results, {month}\n\nHow to read them: [README.md](README.md).\n"
        )
    with file.open("a") as results:
        results.write(entry)


def log_entry(report: str) -> str:
    """An entry of bench/results, with room for its author's conclusions."""
    return (
        f"\n## {datetime.now(UTC):%Y-%m-%d}, commit {_commit()}\n\n**What it says:**\n\n{report}\n"
    )


def setting_lines(program: str, more: str, load_average: float) -> list[str]:
    """Command, commit, machine and versions of a run.  more: what else is said of the command, with
    a comma at its end.
    """
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES)
    command = shlex.join([program, *sys.argv[1:]])
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total / 2**30
    return [
        f"- Command: `{command}`, {more}commit {_commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"- Machine: {_cpu_model()}, {cores} cores, {memory:.0f} GiB; load average before the run "
        f"{load_average:.2f}",
        f"- Python {platform.python_version()}, {versions}",
    ]


def _commit() -> str:
    try:
        commit, changes = (
            _git(*command)
            for command in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with local changes" if changes else commit


def _git(*command: str) -> str:
    return subprocess.run(
        ("git", "-C", _ROOT, *command), capture_output=True, text=True, check=True
    ).stdout.strip()


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"
