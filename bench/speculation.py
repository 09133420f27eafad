"""Time per output token with and without drafts, on a load that repeats its prompt and on free
chat.

    bench/speculation.py [--streams 1 4 16] [--tokens 96] [--rounds 2] [--draft-layers N]

The real core over the real runner, SmolLM2-135M, chat prompts through its template.
The ways take turns, round by round, on the same requests; TPOT of a request is its
time from the first token to the last over the tokens between.  Run it on a machine
that does nothing else.

Drafts are ngram's, or with --draft-layers those of a draft model: the sample model's own
first layers, since it has no smaller sibling.  They were not trained to end there, so
that the figure says what drafting by a model costs, and not how often a trained one is
right.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdcluster_worker.engine.core import EngineCore
    from pdcluster_worker.messages.requests import RequestSpec

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for the fakes of the tests
MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct").expanduser()
BLOCKS, TEXT_LETTERS = 3000, 900
TOPICS = (
    *(
        "the sea",
        "old clocks",
        "how bread is made",
        "trains",
        "a quiet morning",
        "the moon",
        "good tools",
        "learning a language",
    ),
    *(
        "rain",
        "chess",
        "a small garden",
        "mountains",
        "the history of paper",
        "why cats sleep",
        "honey",
        "bridges",
    ),
)


def main() -> None:
    """Print a line for each load and number of streams."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--loads", nargs="+", default=["repeat", "chat"])
    parser.add_argument(
        "--draft-layers", type=int, help="draft by so many first layers of the model"
    )
    options = parser.parse_args()
    # as the engine process has it; read when torch is imported
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["GOMP_SPINCOUNT"] = "20000"
    with tempfile.TemporaryDirectory() as folder:
        draft = (
            None
            if options.draft_layers is None
            else first_layers(MODEL, options.draft_layers, Path(folder))
        )
        report(Bench(options.threads, draft), options)


def report(bench: "Bench", options: argparse.Namespace) -> None:
    """Measure and print."""
    drafter = "ngram" if options.draft_layers is None else f"{options.draft_layers} layers"
    for load in options.loads:
        for num_streams in options.streams:
            found: dict[bool, list[float]] = {False: [], True: []}
            rates: list[tuple[int, int, int]] = []
            for turn in range(options.rounds):
                for drafts in (False, True):
                    seconds, counts = bench.run(
                        load, num_streams, options.tokens, turn, drafts=drafts
                    )
                    found[drafts] += seconds
                    rates += [counts] if drafts else []
            plain, drafted = (statistics.mean(found[drafts]) * 1e3 for drafts in (False, True))
            num_drafted, num_accepted, num_tokens = (
                sum(values) for values in zip(*rates, strict=True)
            )
            share = num_accepted / num_drafted if num_drafted else 0.0
            print(
                f"{load}, {num_streams} streams: TPOT {plain:.1f} ms, "
                f"with {drafter} {drafted:.1f} ms, {drafted / plain:.2f}x; "
                f"drafted {num_drafted} for {num_tokens} tokens, {share:.0%} right",
                flush=True,
            )


class Bench:
    """One loaded model; a new engine over it for each run."""

    def __init__(self, threads: int, draft: Path | None) -> None:
        """draft: folder of a draft model; None = drafts are ngram's."""
        from transformers import AutoTokenizer

        from pdcluster_worker.config.engine import EngineConfig
        from pdcluster_worker.config.worker import ModelConfig
        from pdcluster_worker.messages.engine_settings import SpeculationSettings
        from pdcluster_worker.model.drafter_loader import divide, make_drafter, open_draft_runner
        from pdcluster_worker.model.runner_loader import open_runner

        speculation = (
            SpeculationSettings()
            if draft is None
            else SpeculationSettings(method="draft", draft_model=str(draft))
        )
        model = ModelConfig(name="m", path=str(MODEL), dtype="bfloat16")
        division = divide(
            model,
            EngineConfig(
                max_batched_tokens=2048,
                num_blocks=BLOCKS,
                threads=threads,
                speculation=speculation,
            ),
        )
        opened = open_draft_runner(model, division, "cpu")
        self._runner, self._cache, info = open_runner(model, division.engine)
        self._drafter = make_drafter(division.engine, opened, info)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)

    def run(
        self, load: str, num_streams: int, num_tokens: int, turn: int, *, drafts: bool
    ) -> tuple[list[float], tuple[int, int, int]]:
        """TPOT of each request in seconds; drafts, those of them that were right, and tokens."""
        from pdcluster_worker.messages.engine import EngineStats, Submit, Tokens

        core = self._core(drafts=drafts)
        for number in range(num_streams):
            core.handle(Submit(self._spec(load, number, num_tokens, turn)))
        times: dict[str, list[float]] = {}
        counts = (0, 0)
        while core.has_work:
            outputs = core.step()
            now = time.perf_counter()
            for output in outputs:
                if isinstance(output, Tokens):
                    for token in output.tokens:
                        times.setdefault(token.request_id, []).append(now)
                elif isinstance(output, EngineStats):
                    counts = sum(output.drafted), sum(output.accepted)
        seconds = [
            (each[-1] - each[0]) / (len(each) - 1) for each in times.values() if len(each) > 1
        ]
        return seconds, (*counts, sum(len(each) for each in times.values()))

    def _core(self, *, drafts: bool) -> "EngineCore":
        from pdcluster_worker.engine.core import EngineCore
        from pdcluster_worker.messages.engine_settings import EngineSettings, SpeculationSettings
        from tests.worker.fake_network import FakeNetwork, FakeTransport

        speculation = SpeculationSettings() if drafts else None
        settings = EngineSettings(
            16, BLOCKS, 2048, 64, 4096, prefix_caching=False, speculation=speculation
        )
        # which moves nothing here
        transport = FakeTransport(FakeNetwork(), self._cache, "engine", time.monotonic)
        drafter = self._drafter if drafts else None
        return EngineCore(settings, self._runner, transport, time.monotonic, drafter=drafter)

    def _spec(self, load: str, number: int, num_tokens: int, turn: int) -> "RequestSpec":
        from pdcluster_worker.messages.requests import RequestSpec, SamplingParams

        topic = TOPICS[(number + 16 * turn) % len(TOPICS)]
        if load == "repeat":
            words = (
                "Repeat this text word for word, then give a summary of "
                f"it.\n\n{_text(number + 16 * turn)}"
            )
        else:
            words = f"Tell me something about {topic} that I may not know."
        prompt = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": words}], add_generation_prompt=True, return_dict=False
        )
        sampling = SamplingParams(
            max_tokens=num_tokens,
            seed=number + 16 * turn,
            temperature=0.0 if load == "repeat" else 0.7,
            ignore_eos=True,
        )
        return RequestSpec(f"{load}-{number}", list(prompt), sampling)


def first_layers(model: Path, num_layers: int, folder: Path) -> Path:
    """A model of the first layers of another, with its embedding, last norm and head."""
    from safetensors.torch import load_file, save_file

    weights = {
        name: tensor
        for name, tensor in load_file(model / "model.safetensors").items()
        if ".layers." not in name or int(name.split(".layers.")[1].split(".")[0]) < num_layers
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": num_layers}))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((model / name).read_bytes())
    return folder


def _text(number: int) -> str:
    """Some paragraphs of this project's documents."""
    text = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    start = text.index("\n", number * TEXT_LETTERS % (len(text) - 3 * TEXT_LETTERS)) + 1
    return text[start : start + TEXT_LETTERS]


if __name__ == "__main__":
    main()
