"""Reports that are kept go to the file of their month."""

from datetime import UTC, datetime
from pathlib import Path

import setting


def test_a_kept_entry_goes_to_the_end_of_its_months_file(tmp_path: Path) -> None:
    setting.keep_entry("\n## first\n", tmp_path)
    setting.keep_entry("\n## second\n", tmp_path)

    month = f"{datetime.now(UTC):%Y-%m}"
    assert (tmp_path / f"{month}.md").read_text() == (
        f"# Benchmark results, {month}\n\nHow to read them: [README.md](README.md).\n"
        "\n## first\n\n## second\n"
    )


def test_results_are_kept_in_the_folder_of_the_bench() -> None:
    assert (setting.RESULTS / "README.md").is_file()
