"""Write docs/cli.md: every command of pdctl, from its own help.

`cli_page.py` writes it; `cli_page.py --check` changes nothing, and exits 1 when the
file is not what the commands say.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from typer.main import get_command

from pdctl.cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
HEAD = """# pdctl

Every command and option.  Made from the commands' own help by `make charts`.  `kubectl pd` is the
same program, where `kubectl-pd` is on the PATH.

Exit codes: 0 = done; 1 = something failed; 2 = the input is wrong, with every fault on a line of
its own on stderr; 130 = stopped by Ctrl-C.
"""


def main(arguments: Sequence[str]) -> int:
    """Write, or check with `--check`; returns the exit status."""
    text = "\n".join([HEAD, *sections(get_command(app), "pdctl")])
    if list(arguments) != ["--check"]:
        PAGE.write_text(text)
        return 0
    is_same = PAGE.is_file() and PAGE.read_text() == text
    outcome = "" if is_same else "; docs/cli.md is not what pdctl says: run `make charts`"
    print(f"cli_page: {text.count('## ')} commands{outcome}")
    return 0 if is_same else 1


def sections(group: Any, path: str) -> Iterator[str]:
    """A section for each command; a group's own commands stand in its place."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from sections(command, f"{path} {name}")
        else:
            yield section(command, f"{path} {name}")


def section(command: Any, path: str) -> str:
    """Usage, description and options of one command."""
    given = [each for each in command.params if not each.opts[0].startswith("-")]
    usage = " ".join([path, *(_argument(each) for each in given), "[OPTIONS]"])
    rows = [_row(each) for each in command.params]
    help_text = command.help.replace("\n", " ").replace("  ", "\n\n")
    head = f"## {path}\n\n    {usage}\n\n{help_text}\n"
    return "\n".join([head, "| option | description |", "| --- | --- |", *rows, ""])


def _argument(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper()).strip("[]")
    return name if argument.required else f"[{name}]"


def _row(option: Any) -> str:
    if not option.opts[0].startswith("-"):
        names = f"`{_argument(option)}`"
    else:
        value = f" {option.metavar}" if option.metavar else ""
        names = ", ".join(f"`{name}{value}`" for name in (*option.opts, *option.secondary_opts))
    return f"| {names} | {_text(option)} |"


def _text(option: Any) -> str:
    notes = [(option.help or "").replace("\n", " ").replace("|", "\\|")]
    if option.required:
        notes.append("Required.")
    if option.default not in (None, False, (), [], "") and not callable(option.default):
        value = option.opts[0] if option.secondary_opts else option.default
        notes.append(f"Default: `{value}`.")
    if option.envvar:
        notes.append(f"Environment: `{option.envvar}`.")
    return " ".join(note if note.endswith((".", "]")) else f"{note}." for note in notes if note)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
