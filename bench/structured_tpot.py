"""`python -m bench.structured_tpot`: time per output token at 16 streams, with a JSON schema and
without.

One engine in this process over the sample model.  Every stream makes as many
tokens either way: the schema is a list without an end, and no answer may end early.
Rounds with and without the schema alternate; a round's figure is the mean over its
streams of (last - first token) / (tokens - 1), and the medians are compared.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import tokenizers

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.engine import Submit, Tokens
from pdcluster_worker.messages.requests import Constraint, RequestSpec, SamplingParams
from tests.worker.equality.engines import Engine, Model, engines_over

MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct").expanduser()
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "role": {"enum": ["cook", "driver", "nurse"]},
        "notes": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "role", "notes"],
}
SCHEMA = Constraint("json_schema", json.dumps({"type": "array", "items": PERSON}))
PROMPT = (
    "<|im_start|>user\nInvent many persons, as JSON, number "
    "{index}.<|im_end|>\n<|im_start|>assistant\n"
)


def main() -> None:
    """Print both medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    model = Model(MODEL, dtype="bfloat16", num_blocks=1024)
    try:
        engine = engines_over([model, model])[1]
        compiled(model)
        found: dict[bool, list[float]] = {False: [], True: []}
        for number in range(-1, options.rounds):
            for has_schema in (False, True):
                seconds = run(
                    engine,
                    options.streams,
                    options.tokens,
                    has_schema=has_schema,
                    name=f"{number}-{has_schema}",
                )
                if number >= 0:  # the first round warms up
                    found[has_schema].append(seconds)
    finally:
        model.runner.close()
    free, constrained = (statistics.median(found[has_schema]) for has_schema in (False, True))
    print(f"TPOT without {free * 1000:.2f} ms {_milliseconds(found[False])}")
    print(f"TPOT with    {constrained * 1000:.2f} ms {_milliseconds(found[True])}")
    print(f"ratio {constrained / free:.3f}")


def _milliseconds(seconds: list[float]) -> list[float]:
    return [round(value * 1000, 2) for value in seconds]


def compiled(model: Model) -> None:
    """Wait until the schema is compiled."""
    request = EngineRequest(
        "compile",
        [1],
        1,
        SamplingParams(max_tokens=1, seed=0, eos_token_ids=[2], constraint=SCHEMA),
    )
    while model.runner.grammars.open(request) is not True:
        time.sleep(0.01)
    model.runner.grammars.forget("compile")


def run(engine: Engine, num_streams: int, num_tokens: int, *, has_schema: bool, name: str) -> float:
    """Mean seconds per output token of one round."""
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|im_end|>")
    assert eos is not None, "the sample model has <|im_end|>"
    for index in range(num_streams):
        sampling = SamplingParams(
            max_tokens=num_tokens,
            seed=index,
            temperature=0.8,
            top_p=0.95,
            eos_token_ids=[eos],
            ignore_eos=True,
            constraint=SCHEMA if has_schema else None,
        )
        spec = RequestSpec(
            f"{name}-{index}", tokenizer.encode(PROMPT.format(index=index)).ids, sampling
        )
        engine.core.handle(Submit(spec))
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    while engine.core.has_work or not first:
        outputs = engine.step()
        now = time.monotonic()
        for output in outputs:
            for token in output.tokens if isinstance(output, Tokens) else ():
                first.setdefault(token.request_id, now)
                last[token.request_id] = now
    return statistics.mean((last[one] - first[one]) / (num_tokens - 1) for one in first)


if __name__ == "__main__":
    main()
