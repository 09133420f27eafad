"""The bench's report: cells, ratios, goals and failures are all there, also where a system has no
figure.
"""

from footprint import Footprint
from headline import headline
from layout import cell, table
from report import render
from results import Measurement, Results
from setting import log_entry
from stats import EngineCounters
from workload import Workload

from pdctl.bench.load import LoadResult, RequestResult

WORKLOAD = Workload("A", 32, 2, 1, concurrency=1)
ENGINE = EngineCounters(
    num_steps=10, step_seconds=0.5, overhead_seconds=0.02, num_remote_prefills=1
)


def measured(
    ttft_seconds: float, failure: str | None = None, *, seconds: float = 1.0
) -> Measurement:
    return Measurement(
        LoadResult(
            (RequestResult(0.0, 0.0, (ttft_seconds, ttft_seconds + 0.05), 2, failure),),
            seconds,
            0.01,
        ),
        0.5,
        {"decode-0": ENGINE},
    )


def results(**systems: list[Measurement] | dict[int, Measurement]) -> Results:
    filled = Results([WORKLOAD], list(systems), load_average=0.1)
    for name, rounds in systems.items():
        filled.measurements["A", name] = (
            rounds if isinstance(rounds, dict) else dict(enumerate(rounds))
        )
        filled.conditions[name] = [f"{name}: dtype float32, threads 1"]
    return filled


def line_of(report: str, start: str) -> list[str]:
    line = next(line for line in report.splitlines() if line.startswith(f"| {start}"))
    return [part.strip() for part in line.strip("|").split("|")]


def test_cell_shows_median_and_spread_over_rounds() -> None:
    assert cell([]) == "-"
    assert cell([0.12345]) == "0.123"
    assert cell([3.0, 1.0, 2000.4]) == "3 [1 - 2000]"


def test_table_is_aligned_markdown() -> None:
    assert table(["a", "b"], [["long", "1"]]) == "| a    | b |\n|------|---|\n| long | 1 |"


def test_report_takes_ratios_inside_each_round() -> None:
    report = render(
        results(mixed=[measured(0.1), measured(0.3)], vllm=[measured(0.2), measured(0.2)]), "seed"
    )

    assert line_of(report, "TTFT p50")[1:] == [
        "200 [100 - 300]",
        "200 [200 - 200]",
        "1 [0.5 - 1.5]",
    ]
    assert line_of(report, "A ")[:5] == ["A", "mixed", "decode-0", "10 [10 - 10]", "2 [2 - 2]"]


def test_report_shows_failures_and_has_no_ratio_without_a_figure() -> None:
    report = render(results(mixed=[measured(0.1, "HTTP 503")], vllm=[measured(0.2)]), "seed")

    assert line_of(report, "TTFT p50")[1:] == ["-", "200", "-"]
    assert line_of(report, "good share")[1:3] == ["0", "1"]
    assert "- mixed: sent 1, failed 1" in report
    assert "  - failed: HTTP 503" in report
    assert "other processes 50 % of a core" in report


def test_ratio_of_a_system_that_missed_a_round_is_of_the_rounds_that_both_have() -> None:
    found = results(mixed=[measured(0.1), measured(0.3)], vllm={1: measured(0.2)})
    found.troubles.append("round 1, vllm: StartError: it did not start")
    report = render(found, "seed")

    assert line_of(report, "TTFT p50")[1:] == ["200 [100 - 300]", "200", "1.5"]
    assert "- round 1, vllm: StartError: it did not start" in report
    assert found.has_failures


def test_report_leaves_out_a_system_that_never_ran() -> None:
    found = results(mixed=[measured(0.1)], vllm=[])

    assert line_of(render(found, "seed"), "TTFT p50")[1:] == ["100"]
    assert not found.has_failures


def test_headline_holds_ratios_and_own_numbers_to_their_limits() -> None:
    found = results(mixed=[measured(0.1)], vllm=[measured(0.2, seconds=1.5)])
    found.footprints["mixed"] = [Footprint("mixed-0", 0.5, (10**9, 10**9), (10**9, 10**9), 2**30)]
    text = headline(found)

    assert line_of(text, "A: output tokens/s, mixed / vllm")[1:] == ["1.5", ">= 1.25", "yes"]
    assert line_of(text, "A: TTFT mean ms, mixed / vllm")[1:] == ["0.5", "<= 0.8", "yes"]
    assert line_of(text, "mixed: resident less")[1:] == ["0.926", "<= 0.9", "no"]
    assert headline(results(hf=[measured(0.1)])) == ""


def test_log_entry_leaves_the_verdict_to_its_author() -> None:
    entry = log_entry("the report")

    assert "\n**What it says:**\n" in entry
    assert entry.endswith("\nthe report\n")
