"""Records are written again by `pytest tests/golden --golden-write`, which prints what changed."""

import pytest

from tests.golden import records


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-write", action="store_true", help="write tests/golden's records")


def pytest_configure(config: pytest.Config) -> None:
    records.is_rewriting = config.getoption("--golden-write", default=False)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for difference in records.changes:
        terminalreporter.write_line(difference)
