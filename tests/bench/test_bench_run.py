"""The bench itself: a system that fails loses no other's figures; what is asked for is checked
first.
"""

import asyncio
import doctest
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import footprint
import psutil
import pytest
import report
import run as run_module
from footprint import Footprint, others_cpu_seconds
from run import Bench
from stats import EngineCounters
from system import Address, Start
from workload import Workload

from pdcluster_api.errors import IncompleteAnswerError, StartError
from pdctl.bench.load import BenchRequest, OnChunk, TokenUsage

WORKLOADS = (
    Workload("A", 4, 2, 2, concurrency=2),
    Workload("client", 4, 2, 2, concurrency=2, by="vllm", for_batches=False),
)


class Echo:
    """A system that answers at once; without HTTP."""

    start_seconds = 1.0
    address: Address | None = None

    def __init__(self, *, is_failing: bool) -> None:
        self.is_failing = is_failing

    async def send(self, ask: BenchRequest, on_chunk: OnChunk) -> TokenUsage:
        if self.is_failing:
            raise IncompleteAnswerError("HTTP 500")
        for _ in range(ask.num_output_tokens):
            on_chunk()
        return TokenUsage(ask.num_output_tokens)

    def conditions(self) -> list[str]:
        return ["echo: nothing"]

    async def engine_counters(self) -> dict[str, EngineCounters]:
        return {}

    async def footprints(self, seconds: float) -> list[Footprint]:
        return []


class Echoes(Bench):
    """A bench whose systems are echoes.

    `broken` does not start, `once` only in the first round, the first `failing` fails its first
    requests, and `stopping` is stopped by the user.
    """

    vocab_size = 300
    order: list[str]
    ended: list[str]

    def start(self, name: str) -> Start:
        @asynccontextmanager
        async def system() -> AsyncIterator[Echo]:
            self.order.append(name)
            if name == "stopping":
                raise asyncio.CancelledError
            if name == "broken" or (name == "once" and self.order.count("once") > 1):
                raise StartError("it did not start", exit_code=1)
            yield Echo(is_failing=self.order == ["failing"])
            self.ended.append(name)

        return system


def stage(*systems: str, rounds: int = 2) -> Echoes:
    made = Echoes(systems, WORKLOADS, rounds, "seed", Path("/models/small"), {}, "bfloat16")
    object.__setattr__(made, "order", [])
    object.__setattr__(made, "ended", [])
    return made


async def test_a_system_that_fails_is_reported_and_the_others_are_measured() -> None:
    bench = stage("mixed", "broken", "once")

    results = await run_module._run(bench)

    assert len(results.rounds("A", "mixed")) == 2
    assert len(results.rounds("A", "once")) == 1
    assert results.troubles[0] == "round 1, broken: StartError: it did not start"
    assert len(results.troubles) == 3


async def test_systems_take_turns_in_an_order_that_turns() -> None:
    bench = stage("mixed", "1p1d", "hf", rounds=3)
    await run_module._run(bench)

    assert bench.order == ["mixed", "1p1d", "hf", "1p1d", "hf", "mixed", "hf", "mixed", "1p1d"]
    assert bench.ended == bench.order


async def test_vllm_is_started_once_and_ended_with_the_bench(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_module, "KEPT", {"vllm"})
    bench = stage("mixed", "vllm", rounds=2)
    results = await run_module._run(bench)

    assert bench.order == ["mixed", "vllm", "mixed"]
    assert bench.ended == ["mixed", "mixed", "vllm"]
    assert (len(results.rounds("A", "vllm")), len(results.start_seconds["vllm"])) == (2, 1)


async def test_a_kept_system_that_fails_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "KEPT", {"failing"})
    bench = stage("failing", rounds=3)
    results = await run_module._run(bench)

    assert bench.order == ["failing", "failing"]
    assert results.troubles == [
        "round 1, failing: StartError: 2 of 2 requests failed, the first: HTTP 500"
    ]
    assert sorted(results.measurements["A", "failing"]) == [1, 2]


async def test_a_system_without_http_is_left_out_of_the_other_client() -> None:
    results = await run_module._run(stage("hf", rounds=1))

    assert not results.rounds("client", "hf")


async def test_a_bench_that_is_stopped_reports_what_it_has_measured() -> None:
    bench = stage("mixed", "stopping", rounds=2)
    results = await run_module._run(bench)

    assert len(results.rounds("A", "mixed")) == 1
    assert results.was_stopped
    assert "- stopped before its end, in round 1 at stopping" in report.render(results, "seed")
    assert bench.ended == ["mixed"]
    with pytest.raises(asyncio.CancelledError):  # nothing was measured
        await run_module._run(stage("stopping"))


async def test_a_bench_without_a_figure_is_an_error_that_says_why() -> None:
    with pytest.raises(StartError, match="broken: StartError: it did not start"):
        await run_module._run(stage("broken"))


@pytest.mark.parametrize(
    ("requested", "names"),
    [(["A"], ["A"]), (["B"], ["B-0.5", "B-1.0", "B-1.5"]), (["B-1.0", "chat"], ["B-1.0", "chat"])],
)
def test_workloads_are_chosen_by_name_or_group(
    requested: list[str], names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(__file__).parent
    monkeypatch.setattr(run_module, "cached_model", lambda _: model)
    monkeypatch.setattr(Path, "is_file", lambda _: True)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "run.py",
            "--workload",
            *requested,
            "--only",
            "mixed",
            "--set",
            "maxSequences=128",
            "--variant",
            "maxBatchedTokens=512",
        ],
    )
    monkeypatch.setattr(run_module, "read_native_dtype", lambda: "bfloat16")
    bench = run_module._bench_of(run_module._options())

    assert [workload.name for workload in bench.workloads] == names
    assert (bench.systems, bench.variant) == (["mixed", "variant"], {"maxBatchedTokens": 512})
    assert bench.engine == {"maxSequences": 128}


async def test_idle_footprint_is_of_the_process_and_its_children(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(footprint, "SETTLE_SECONDS", 0.0)
    [found] = await footprint.idle_footprints([footprint.Watched("me", os.getpid(), 7)], 0.01)

    assert (found.worker, found.kv_bytes) == ("me", 7)
    assert found.server_bytes[0] > found.server_bytes[1] > 0


def test_processor_time_of_others_leaves_out_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = psutil.cpu_times()
    monkeypatch.setattr(psutil, "cpu_times", lambda: machine)
    before, own = others_cpu_seconds(), time.process_time()
    while time.process_time() - own < 0.1:
        pass

    assert others_cpu_seconds() <= before - 0.09


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds: must be at least 1"),
        (["--quick", "--log"], "--log: keeps figures"),
        (["--workload", "C"], "invalid choice"),
    ],
)
def test_wrong_option_is_refused(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit):
        run_module._options()
    assert message in capsys.readouterr().err


def test_field_of_the_engine_without_a_value_is_refused() -> None:
    assert doctest.testmod(run_module).failed == 0
    with pytest.raises(
        StartError,
        match=r"--set or --variant: maxBatchedTokens is no FIELD=VALUE; write e\.g\. "
        r"maxBatchedTokens=512",
    ):
        run_module.engine_fields(["maxBatchedTokens"])
