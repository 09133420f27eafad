"""Time and memory of a schema's first request, compiled cold through a GrammarCache, one at a time.

CPU seconds are of this process; wall time counts on a quiet machine only.

    .venv/bin/python bench/structured_compile.py
"""

import json
import resource
import time
from pathlib import Path
from typing import Any

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import Constraint, SamplingParams
from pdcluster_worker.structured_output.grammar_cache import GrammarCache

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
    "30 strings of bounds to 1000": closed(
        {f"p{n}": {"type": "string", "maxLength": 100 + 30 * n} for n in range(30)}, []
    ),
    "500 properties": strings(500),
    "200 tools": tools(200),
}


def main() -> None:
    """Print a row for each schema."""
    cache = GrammarCache(VOCAB_SIZE)
    cache.folder = MODEL
    compiled(cache, Constraint("regex", "a"))  # reads the vocabulary
    print(f"{'':28}{'ms':>8}{'cpu ms':>8}{'MB at most':>12}")
    try:
        for name, schema in CASES.items():
            seconds, cpu, num_bytes = compiled(cache, constraint_of(schema))
            print(f"{name:28}{1000 * seconds:8.1f}{1000 * cpu:8.1f}{num_bytes / 1e6:12.1f}")
    finally:
        cache.close()


def constraint_of(schema: dict[str, Any]) -> Constraint:
    """As the server makes it."""
    if "triggers" in schema:
        return Constraint("structural_tag", tag_of(schema))
    return Constraint("json_schema", json.dumps(schema))


def tag_of(form: dict[str, Any]) -> str:
    """The text of a structural tag."""
    return json.dumps({"type": "structural_tag", "format": form})


def compiled(cache: GrammarCache, constraint: Constraint) -> tuple[float, float, int]:
    """Wall and CPU seconds, and estimated bytes, of one constraint in an engine."""
    sampling = SamplingParams(max_tokens=1, seed=0, eos_token_ids=[END], constraint=constraint)
    request = EngineRequest("compile", [1], 1, sampling)
    started, cpu = time.monotonic(), cpu_seconds()
    while (answer := cache.open(request)) is False:
        time.sleep(0.0001)
    assert answer is True, answer
    found = time.monotonic() - started, cpu_seconds() - cpu
    num_bytes = cache.matcher(request).form.num_bytes
    cache.forget("compile")
    return *found, num_bytes


def cpu_seconds() -> float:
    """CPU time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
