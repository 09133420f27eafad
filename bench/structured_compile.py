"""Time and memory of a schema's first request, beside the library alone.

Each schema is compiled cold, one at a time: through a GrammarCache, as an engine does it (a
compile process first, then the engine's own process), and by xgrammar's compiler in this one.
CPU seconds are of this process; wall time counts on a quiet machine only.

    .venv/bin/python bench/structured_compile.py
"""

import json
import resource
import time
from pathlib import Path
from typing import Any

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.constraint import Constraint
from pdcluster_worker.messages.requests import SamplingParams
from pdcluster_worker.structured_output.compiler import MOST_WHITE_SPACE
from pdcluster_worker.structured_output.grammar_cache import GrammarCache
from pdcluster_worker.structured_output.native import library
from pdcluster_worker.structured_output.vocabulary import read_vocabulary

MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct").expanduser()
VOCAB_SIZE = 49_152
END = 2


def strings(count: int, **rules: Any) -> dict[str, Any]:
    """An object of so many strings, all required."""
    names = [f"p{number}" for number in range(count)]
    properties = {name: {"type": "string", **rules} for name in names}
    return closed(properties, names)


def closed(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """An object of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def tools(count: int) -> dict[str, Any]:
    """The structural tag of so many tools, as the server makes it of hermes' calls."""
    return {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [
            {
                "type": "tag",
                "begin": f'<tool_call>\n{{"name": "tool_{number}", "arguments": ',
                "content": {
                    "type": "json_schema",
                    "json_schema": strings(2, maxLength=30),
                    "max_whitespace_cnt": 1,
                },
                "end": "}\n</tool_call>",
            }
            for number in range(count)
        ],
    }


CASES: dict[str, dict[str, Any]] = {
    "20 strings of at most 30": strings(20, maxLength=30),
    "80 strings of at most 30": strings(80, maxLength=30),
    "80 strings of 80 bounds": closed(
        {f"p{n}": {"type": "string", "maxLength": n} for n in range(1, 81)}, []
    ),
    "80 of date-time": strings(80, format="date-time"),
    "anyOf 60 objects": {
        "anyOf": [
            closed({f"k{n}": {"type": "string", "maxLength": 30}}, [f"k{n}"]) for n in range(60)
        ]
    },
    "500 properties": strings(500),
    "200 tools": tools(200),
}


def main() -> None:
    """Print a row for each schema."""
    book = GrammarCache(VOCAB_SIZE)
    book.folder = MODEL
    vocabulary = library().TokenizerInfo(
        read_vocabulary(MODEL, VOCAB_SIZE), 0, VOCAB_SIZE, [], False
    )
    engine(book, Constraint("regex", "a"))  # starts a compile process
    print(f"{'':28}{'ours s':>8}{'cpu s':>8}{'MB':>6}{'library s':>11}{'cpu s':>8}{'MB':>6}")
    try:
        for name, schema in CASES.items():
            ours = engine(book, constraint_of(schema))
            alone = library_alone(vocabulary, schema)
            print(
                f"{name:28}{ours[0]:8.2f}{ours[1]:8.2f}{ours[2] / 1e6:6.1f}"
                f"{alone[0]:11.2f}{alone[1]:8.2f}{alone[2] / 1e6:6.1f}"
            )
    finally:
        book.close()


def constraint_of(schema: dict[str, Any]) -> Constraint:
    """As the server makes it."""
    if "triggers" in schema:
        return Constraint("structural_tag", tag_of(schema))
    return Constraint("json_schema", json.dumps(schema))


def tag_of(form: dict[str, Any]) -> str:
    """The text of a structural tag."""
    return json.dumps({"type": "structural_tag", "format": form})


def engine(book: GrammarCache, constraint: Constraint) -> tuple[float, float, int]:
    """Wall and CPU seconds, and bytes, of one constraint in an engine; the compile process's CPU
    is not in them.
    """
    sampling = SamplingParams(max_tokens=1, seed=0, eos_token_ids=[END], constraint=constraint)
    request = EngineRequest("compile", [1], 1, sampling)
    started, cpu = time.monotonic(), cpu_seconds()
    while (answer := book.open(request)) is False:
        time.sleep(0.001)
    assert answer is True, answer
    found = time.monotonic() - started, cpu_seconds() - cpu
    num_bytes = book._followed["compile"].num_bytes
    book.forget("compile")
    return *found, num_bytes


def library_alone(vocabulary: Any, schema: dict[str, Any]) -> tuple[float, float, int]:
    """The same of xgrammar's compiler, with as many threads."""
    compiler = library().GrammarCompiler(vocabulary, 2, False, -1)
    started, cpu = time.monotonic(), cpu_seconds()
    compiled = (
        compiler.compile_structural_tag(tag_of(schema))
        if "triggers" in schema
        else compiler.compile_json_schema(
            json.dumps(schema), True, None, None, False, MOST_WHITE_SPACE, False
        )
    )
    return (
        time.monotonic() - started,
        cpu_seconds() - cpu,
        int(compiled.memory_size_bytes()),
    )


def cpu_seconds() -> float:
    """CPU time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
