"""`pdctl` in the process of the tests."""

from click.testing import Result
from typer.testing import CliRunner

from pdctl.cli.main import app


def pdctl(*arguments: str) -> Result:
    """Run a command; its output and exit code are in the result."""
    return CliRunner().invoke(app, arguments)
