"""lm-evaluation-harness over our completions API and over transformers: the same scores, item by
item.

    bench/lm_eval_scores.py [--concurrent 8]

Starts examples/chat.yaml in float32, and runs a task of fifty multiple-choice items
(`lm_eval_items`) twice, by lm-eval's `local-completions` and by its `hf`, both from an
environment of its own, which is made on the first run.  Exit status 1 where scores or
choices differ, or a log-likelihood by more than TOLERANCE.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from lm_eval_items import TASK, write_task

from pdctl.bench.measure import started_cluster

ROOT = Path(__file__).parents[1]
MODEL = Path("~/.cache/pdcluster/smollm2-135m-instruct").expanduser()
FOLDER = Path.home() / ".cache" / "pdcluster" / "lm-eval"
PACKAGE = "lm-eval[api]==0.4.13"
TOLERANCE = 2e-3
"""Tolerance of a choice's log-likelihood, which sums a few tokens', each of float32 logits."""


def main() -> None:
    """Print both scores, and how far the log-likelihoods are apart."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--concurrent", type=int, default=8)
    options = parser.parse_args()
    install()
    sys.exit(asyncio.run(compare(options.concurrent)))


def install() -> None:
    """An environment with lm-eval, which finds torch and transformers in ours."""
    if (FOLDER / "ready").exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    python = FOLDER / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", PACKAGE], check=True)
    found = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        check=True,
        capture_output=True,
    )
    Path(found.stdout.decode().strip(), "ours.pth").write_text(
        sysconfig.get_paths()["purelib"] + "\n"
    )
    (FOLDER / "ready").touch()


async def compare(num_concurrent: int) -> int:
    """The exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder)
        file = folder / "chat.yaml"
        file.write_text(
            (ROOT / "examples" / "chat.yaml")
            .read_text()
            .replace("dtype: auto", "dtype: float32", 1)
        )
        async with started_cluster(file, MODEL) as started:
            arguments = {
                "model": started.model,
                "base_url": f"{started.base_url}/v1/completions",
                "tokenizer": MODEL,
                "tokenizer_backend": "huggingface",
                "num_concurrent": num_concurrent,
                "max_retries": 1,
            }
            ours = await asyncio.to_thread(scores, "local-completions", arguments, folder)
        theirs = await asyncio.to_thread(
            scores, "hf", {"pretrained": MODEL, "dtype": "float32"}, folder
        )
    return report(ours, theirs)


def scores(model: str, arguments: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run lm-eval: the results, the log-likelihoods of each item, and the seconds it took."""
    out = folder / model
    command = [
        *(
            str(FOLDER / "bin" / "lm_eval"),
            "--model",
            model,
            "--tasks",
            TASK,
            "--include_path",
            str(folder),
        ),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--output_path", str(out), "--log_samples", "--batch_size", "1", "--device", "cpu"),
    ]
    start = time.monotonic()
    subprocess.run(
        command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
    )
    seconds = time.monotonic() - start
    results = json.loads(next(out.rglob("results_*.json")).read_text())["results"][TASK]
    samples = [
        json.loads(line) for line in next(out.rglob("samples_*.jsonl")).read_text().splitlines()
    ]
    samples.sort(key=lambda sample: int(sample["doc_id"]))
    likelihoods = [[float(choice[0][0]) for choice in sample["resps"]] for sample in samples]
    return {"results": results, "likelihoods": likelihoods, "seconds": seconds}


def report(ours: dict[str, Any], theirs: dict[str, Any]) -> int:
    """The exit status."""
    for name, run in (("pdcluster", ours), ("transformers", theirs)):
        result, num_items = run["results"], len(run["likelihoods"])
        print(
            f"{name}: acc={result['acc,none']} acc_norm={result['acc_norm,none']} "
            f"items={num_items} seconds={run['seconds']:.0f}"
        )
    pairs = list(zip(ours["likelihoods"], theirs["likelihoods"], strict=True))
    furthest = max(abs(a - b) for mine, other in pairs for a, b in zip(mine, other, strict=True))
    num_chosen = sum(mine.index(max(mine)) == other.index(max(other)) for mine, other in pairs)
    print(
        f"log-likelihoods: at most {furthest:.2e} apart; the same choice in {num_chosen} of "
        f"{len(pairs)} items"
    )
    same = all(
        ours["results"][name] == theirs["results"][name] for name in ("acc,none", "acc_norm,none")
    )
    return 0 if same and num_chosen == len(pairs) and furthest <= TOLERANCE else 1


if __name__ == "__main__":
    main()
