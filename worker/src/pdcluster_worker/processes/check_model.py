"""`python -m pdcluster_worker.processes.check_model FOLDER`: which code would serve a model, and
how fast on this machine's CPU.

It loads the model as a worker would; with --config it reads config.json alone, without torch.  Exit
status: 0, and one line on stdout; 2 where it is refused, and the last line on stderr, `error: ...`,
says why.
"""

import argparse
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.loading.quantization import read_schemes
from pdcluster_worker.model.loading.support import check_attention, check_kind, read_config

if TYPE_CHECKING:
    from pdcluster_worker.model.loading.loader import LoadedModel

_DECODE_STEPS = 8


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pdcluster_worker.processes.check_model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--config", action="store_true", help="check config.json alone")
    arguments = parser.parse_args()
    try:
        if arguments.config:
            check_config(arguments.folder)
        else:
            sys.stdout.write(f"{_verdict(arguments.folder)}\n")
    except ModelError as e:
        sys.stderr.write(f"error: {e}\n")
        return 2
    return 0


def check_config(folder: Path) -> None:
    """Raises ModelError for what no code of ours serves, as far as config.json says it."""
    config = read_config(folder)
    with suppress(AttributeError, TypeError):  # of a field that transformers reads in its own way
        check_kind({**config, "generates_text": True})
        check_attention(config, max_model_len=0)
    read_schemes(config)


def _verdict(folder: Path) -> str:
    from pdcluster_worker.model.loading.loader import load_model
    from pdcluster_worker.server.text.tokenizer import Tokenizer
    from pdcluster_worker.system.native_dtype import dtype_of_device

    loaded = load_model(folder, dtype_of_device("cpu"), block_size=16)
    Tokenizer.load(folder, None)
    return f"{described(loaded)}; {_speed(loaded)}"


def described(loaded: "LoadedModel") -> str:
    """
    >>> from types import SimpleNamespace
    >>> info = SimpleNamespace(max_model_len=4096, dtype="bfloat16", precision="int8")
    >>> described(SimpleNamespace(info=info, weight_bytes=162_000_000, checkpoint=object()))
    "served by the engine's own decoder: 0.16 GB of weights in int8 and bfloat16, up to 4096 tokens"
    """
    dtypes = " and ".join(dict.fromkeys((loaded.info.precision, loaded.info.dtype)))
    size = f"{loaded.weight_bytes / 1e9:.2f} GB of weights in {dtypes}"
    text = f"{size}, up to {loaded.info.max_model_len} tokens"
    if loaded.checkpoint is not None:
        return f"served by the engine's own decoder: {text}"
    return f"served by transformers' code on CPUs, which is slower, since {loaded.reason}: {text}"


def _speed(loaded: "LoadedModel") -> str:
    """Measure one prefill step and a few decode steps of a single request, once."""
    import torch

    from pdcluster_worker.config.engine import EngineConfig
    from pdcluster_worker.engine.request import Batch, EngineRequest, Scheduled
    from pdcluster_worker.messages.requests import SamplingParams
    from pdcluster_worker.model.kv_cache import open_cache
    from pdcluster_worker.model.kv_size import fit_length
    from pdcluster_worker.model.runner_loader import make_runner

    engine = EngineConfig()
    info = loaded.info
    cache = open_cache(
        *(info.geometry, engine, torch.device("cpu")), info.vocab_size, loaded.weight_bytes
    )
    info = fit_length(info, cache.num_blocks, engine)
    runner = make_runner(replace(loaded, info=info), cache, engine)
    runner.warm_up()
    prompt = [0] * max(1, min(engine.max_batched_tokens, info.max_model_len - _DECODE_STEPS - 1))
    num_blocks = -(-(len(prompt) + _DECODE_STEPS) // cache.geometry.block_size)
    sampling = SamplingParams(max_tokens=_DECODE_STEPS, seed=0)
    request = EngineRequest(
        "check", list(prompt), len(prompt), sampling, block_table=list(range(num_blocks))
    )
    seconds = []
    for _ in range(1 + _DECODE_STEPS):
        started = time.monotonic()
        num_tokens = request.num_tokens - request.num_computed_tokens
        runner.execute(Batch((Scheduled.of(request, num_tokens),)))
        seconds.append(time.monotonic() - started)
        request.num_computed_tokens = request.num_tokens
        request.tokens.append(0)
    runner.close()
    prefill, *decode = seconds
    note = f"; {info.length_note}" if info.length_note else ""
    return (
        f"about {len(prompt) / prefill:.0f} tokens/s of prefill and "
        f"{1 / statistics.median(decode):.0f} tokens/s of decode for one request on "
        f"{torch.get_num_threads()} CPU threads, measured once{note}"
    )


if __name__ == "__main__":
    sys.exit(main())
