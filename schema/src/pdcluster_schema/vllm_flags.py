"""vLLM's command line as flags: what one says, and one list of arguments over another."""

import re
from collections.abc import Iterable
from itertools import chain
from typing import Final, NamedTuple

_ALIASES: Final = {
    "q": "quantization",
    "O": "optimization-level",
    "ep": "enable-expert-parallel",
    "sc": "speculative-config",
    "cc": "compilation-config",
    "ac": "attention-config",
    "dc": "diffusion-config",
}
"""vLLM's short flags that are no field of `engine` and not set by PDCluster."""

_SHORTEST: Final = {
    "attention-backend": "attention-b",
    "disable-hybrid-kv-cache-manager": "disable-h",
    "hf-overrides": "hf-o",
    "kv-cache-dtype": "kv-cache-d",
    "load-format": "loa",
    "max-lora-rank": "max-lora-r",
    "quantization": "qu",
    "quantization-config": "quantization-",
    "spec-method": "spec-me",
    "spec-model": "spec-mo",
    "speculative-config": "specu",
}
"""Flags that are read here, and the shortest beginning that vLLM (0.32) may take for each."""

_FLAG = re.compile("--?[A-Za-z]")  # not the value -1


class Flag(NamedTuple):
    """name: long, without dashes before it and without `no-`; empty before the first flag.
    texts: its arguments as given.
    """

    name: str
    texts: tuple[str, ...]

    @property
    def value(self) -> str:
        """Its values; `true` or `false` of a switch."""
        first, has_value, value = self.texts[0].strip().partition("=")
        values = ((value,) if has_value else ()) + self.texts[1:]
        return " ".join(values).strip() or ("false" if first.startswith("--no-") else "true")


def flags_of(arguments: Iterable[str]) -> list[Flag]:
    """Arguments by the flag that they follow, in order; a beginning of one that is read here by the
    whole name.
    """
    found: list[list[str]] = []
    for text in arguments:
        if not found or _FLAG.match(text):
            found.append([text])
        else:
            found[-1].append(text)
    return [Flag(_name(texts[0]), tuple(texts)) for texts in found]


def merged_arguments(ours: Iterable[str], theirs: Iterable[str]) -> tuple[str, ...]:
    """`theirs` behind those flags of `ours` that they do not give.

    >>> merged_arguments(["--seed=1", "--no-enable-x", "-ep"], ["--enable_x", "--seed", "2"])
    ('-ep', '--enable_x', '--seed', '2')
    """
    theirs = tuple(theirs)
    names = {flag.name for flag in flags_of(theirs)}
    kept = [flag.texts for flag in flags_of(ours) if not any(_same(flag.name, n) for n in names)]
    return (*chain.from_iterable(kept), *theirs)


def _name(text: str) -> str:
    """Underscores count as dashes up to a dot, as vLLM reads them."""
    if not _FLAG.match(text):
        return ""
    name = text.partition("=")[0].strip().lstrip("-")
    if re.fullmatch(r"O\w", name):  # -O3
        name = "O"
    flag, dot, key = name.partition(".")
    long = _ALIASES.get(flag, flag).replace("_", "-").removeprefix("no-")
    return f"{_whole(long)}{dot}{key}"


def _whole(name: str) -> str:
    found = (
        flag
        for flag, shortest in _SHORTEST.items()
        if flag.startswith(name) and name.startswith(shortest)
    )
    return next(found, name)


def _same(one: str, other: str) -> bool:
    """A flag in JSON takes the place of its dotted parts, and they of it, as for vLLM."""
    return one == other or f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")
