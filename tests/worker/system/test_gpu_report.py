"""Report of a container's GPUs: what is read of it, and the reason where nothing can be."""

import os

import pytest

from pdcluster_worker.system.nvidia import FRESH_SECONDS, GpuUse, parse_report, read_report

TWO = "NVIDIA B200, 1000, 900, 80, 40\nNVIDIA B200, 1000, 700, 40, 20\n"
MIB = 2**20


def test_gpus_of_a_report_are_taken_together():
    report = parse_report(TWO)

    assert [gpu.name for gpu in report.gpus] == ["NVIDIA B200"] * 2
    assert report.use() == GpuUse(1600 * MIB, 2000 * MIB, pytest.approx(0.6), pytest.approx(0.3))


def test_a_part_of_a_gpu_says_its_memory_and_not_its_work():
    use = parse_report("NVIDIA H100 MIG 1g.10gb, 9984, 9000, [N/A], [N/A]\n").use()

    assert use == GpuUse(9000 * MIB, 9984 * MIB, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "nvidia-smi: no GPU"),
        ("No devices were found\n", "nvidia-smi: No devices were found"),
        ("a\nb", "nvidia-smi: a b"),
        ("NVIDIA B200, [N/A], 9, 1, 1", "nvidia-smi: NVIDIA B200, [N/A], 9, 1, 1"),
        (f"{TWO}Unable to determine the device handle", "Unable to determine"),
    ],
)
def test_what_is_no_report_is_the_reason(text, reason):
    report = parse_report(text)

    assert (report.gpus, report.use()) == ((), None)
    assert reason in report.reason


def test_no_report_and_an_old_one_say_nothing(tmp_path):
    path = tmp_path / "gpus.csv"
    assert read_report(path).reason == "its liveness probe has not reported its GPUs"

    path.write_text(TWO)
    os.utime(path, (1000.0, 1000.0))
    assert read_report(path, lambda: 1000.0 + FRESH_SECONDS).use() is not None
    late = read_report(path, lambda: 1001.0 + FRESH_SECONDS)
    assert (late.gpus, late.reason) == ((), "its liveness probe reported its GPUs 61 s ago")
