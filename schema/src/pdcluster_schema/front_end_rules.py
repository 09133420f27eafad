"""Rules of `model.frontend: engine` over the engines of all roles."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from pdcluster_schema.section import Rule
from pdcluster_schema.sections import COMPUTING

_PARSER_FLAG = r"^--reasoning[-_]parser(=|$)"


def front_end_rules() -> Iterator[Rule]:
    front_end = "self.model.?frontend.orValue('pdcluster')"
    yield Rule(
        cel=f"{front_end} != 'engine' || self.?engine.?type.orValue('pdcluster') != 'pdcluster'",
        holds=lambda spec: spec.model.frontend != "engine" or spec.engine.type != "pdcluster",
        reason="is engine, which is for a stock engine",
        fix="leave it out, or set engine.type: vllm",
        at="model.frontend",
    )
    for path in ("engine", *(f"roles.{role}.engine" for role in COMPUTING)):
        names = f"{path}.args".split(".")
        parts = [".".join(names[: n + 1]) for n in range(len(names)) if names[n] != "roles"]
        none = " || ".join(f"!has(self.{part})" for part in parts)
        yield Rule(
            cel=f"{front_end} == 'engine' || {none} || "
            f"!self.{path}.args.exists(a, a.matches('{_PARSER_FLAG}'))",
            holds=partial(_parses_once, path),
            reason="has --reasoning-parser, which leaves structured answers without their form "
            "until it sees the end of the reasoning, which PDCluster parses itself",
            fix="set model.reasoningParser in its place, or model.frontend: engine",
            at=f"{path}.args",
        )


def _parses_once(path: str, spec: Any) -> bool:
    """Return whether a reasoning parser of the engine stands beside its front end."""
    part = spec
    for name in path.split("."):
        part = None if part is None else getattr(part, name)
    args = () if part is None else part.args or ()
    return spec.model.frontend == "engine" or not any(re.match(_PARSER_FLAG, a) for a in args)
