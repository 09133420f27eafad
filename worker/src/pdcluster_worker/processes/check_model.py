"""`python -m pdcluster_worker.processes.check_model FOLDER`: which code would serve a model.

It loads the model as a worker would.  Exit status: 0, and one line on stdout; 2 where it is
refused, and the last line on stderr, `error: ...`, says why.
"""

import sys
from pathlib import Path

from pdcluster_worker.errors import ModelError
from pdcluster_worker.model.loading.loader import LoadedModel, load_model
from pdcluster_worker.server.text.tokenizer import Tokenizer

_BLOCK_SIZE = 16


def main() -> int:
    folder = Path(sys.argv[1])
    try:
        loaded = load_model(folder, "bfloat16", block_size=_BLOCK_SIZE)
        Tokenizer.load(folder, None)
    except ModelError as e:
        sys.stderr.write(f"error: {e}\n")
        return 2
    sys.stdout.write(f"{_verdict(loaded)}\n")
    return 0


def _verdict(loaded: LoadedModel) -> str:
    """
    >>> from types import SimpleNamespace
    >>> info = SimpleNamespace(max_model_len=4096)
    >>> _verdict(SimpleNamespace(info=info, weight_bytes=269_000_000, checkpoint=object()))
    "served by the engine's own decoder: 0.27 GB of weights in bfloat16, up to 4096 tokens"
    """
    size = f"{loaded.weight_bytes / 1e9:.2f} GB of weights in bfloat16"
    text = f"{size}, up to {loaded.info.max_model_len} tokens"
    if loaded.checkpoint is not None:
        return f"served by the engine's own decoder: {text}"
    return f"served by transformers' code on CPUs, which is slower, since {loaded.reason}: {text}"


if __name__ == "__main__":
    sys.exit(main())
