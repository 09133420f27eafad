"""The blocks of docs/clients.md: code whose first line names the packages that it needs; and the
page's part on outcomes.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

NODE = "javascript"
ADDRESS = "127.0.0.1:8000"
RESULTS = "<!-- tested -->"

_PROGRAMS = {"python": ("python", "py"), NODE: ("node", "mjs"), "bash": ("bash", "sh")}
_PART = re.compile(
    r"^## (?P<title>[^\n]+)$|^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_PACKAGES = re.compile(r"(?:#|//) (?:pip|npm) install (?P<names>.+)")


@dataclass(frozen=True)
class Block:
    """One block.  title: its heading.  packages: as a package manager takes them."""

    title: str
    language: str
    packages: tuple[str, ...]
    code: str

    @property
    def program(self) -> str:
        """Program that runs it."""
        return _PROGRAMS[self.language][0]

    @property
    def suffix(self) -> str:
        """Suffix of a file that holds it."""
        return _PROGRAMS[self.language][1]


def blocks(text: str) -> list[Block]:
    """The blocks of a page, in order.  Raises ValueError for one that names no packages."""
    found, title = [], ""
    for part in _PART.finditer(text):
        if part["title"]:
            title = part["title"]
            continue
        first = part["code"].partition("\n")[0]
        packages = _PACKAGES.fullmatch(first)
        if packages is None or part["language"] not in _PROGRAMS:
            raise ValueError(
                f"{title}: a block of {part['language']} begins with {first!r}: name its packages "
                "there"
            )
        found.append(Block(title, part["language"], tuple(packages["names"].split()), part["code"]))
    return found


def with_port(code: str, port: int) -> str:
    """The block for a server at another port of this machine."""
    return code.replace(ADDRESS, f"127.0.0.1:{port}")


def with_results(text: str, rows: Sequence[tuple[str, str, bool]], day: str) -> str:
    """The page with a table of outcomes: heading, version, whether it passed."""
    head, marker, _ = text.partition(RESULTS)
    lines = [
        f"{title} | {version} | {'passed' if passed else 'failed'}"
        for title, version, passed in rows
    ]
    table = "\n".join(
        [
            "| block | newest version on " + day + " | |",
            "| --- | --- | --- |",
            *(f"| {line} |" for line in lines),
        ]
    )
    return f"{head}{marker}\n{table}\n"
