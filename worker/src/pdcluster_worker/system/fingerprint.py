"""Fingerprint of a model folder's weights, fast for any size, compared in the pair check.

It covers the config, the tensors' shapes and bytes from both ends of every tensor.
"""

import hashlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pdcluster_worker.errors import ModelError

# from each end of each tensor: one disk block, so 140 GB take some thousand reads
SAMPLE_BYTES = 4096

_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit

# config fields that do not affect the weights
_NOT_WEIGHTS = {
    "_name_or_path",
    "_model_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
}


def weights_files(folder: Path) -> list[Path]:
    """Safetensors files by name, or without any torch's .bin files."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def gguf_fix(folder: Path) -> str:
    """The fix for a folder with a GGUF model, else empty."""
    found = next(iter(sorted(folder.glob("*.gguf"))), None)
    if found is None:
        return ""
    return (
        f"; {found.name} is GGUF, which a worker does not load: take the model's original folder, "
        "or that which `python -m pdcluster_worker.fetch.gguf_file FILE FOLDER` makes of it"
    )


def fingerprint(folder: Path) -> str:
    """Hex sha256.  Raises ModelError for an unreadable or malformed file."""
    digest = hashlib.sha256()
    digest.update(_essentials(folder / "config.json"))
    for path in weights_files(folder):
        try:
            for part in _parts(path):
                digest.update(part)
        except OSError as e:
            raise ModelError(
                f"cannot read {path}: {e.strerror}: make the model folder readable for user id "
                f"{os.geteuid()}"
            ) from e
    return digest.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from (
            _safetensors_parts(path, file) if path.suffix == ".safetensors" else _spread_parts(file)
        )


def _essentials(path: Path) -> bytes:
    config: dict[str, Any] = json.loads(path.read_bytes())
    kept = {name: value for name, value in config.items() if name not in _NOT_WEIGHTS}
    return json.dumps(kept, sort_keys=True).encode()


def _safetensors_parts(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The header, then both ends of each tensor in file order."""
    header = _safetensors_header(path, file)
    yield header
    tensors = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
    first_byte = 8 + len(header)
    for begin, end in sorted(tuple(entry["data_offsets"]) for entry in tensors):
        yield from _ends(file, first_byte + begin, first_byte + end)


def _safetensors_header(path: Path, file: BinaryIO) -> bytes:
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= _MAX_HEADER_BYTES:
        raise ModelError(
            f"{path} is not a safetensors file (header of {length} bytes): copy the model folder "
            "again"
        )
    header = file.read(length)
    if len(header) != length:
        raise ModelError(f"{path} is cut short inside its header: copy the model folder again")
    return header


def _ends(file: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
    """First and last SAMPLE_BYTES of [begin, end), which may overlap."""
    length = min(SAMPLE_BYTES, end - begin)
    for start in (begin, end - length):
        file.seek(start)
        yield file.read(length)


def _spread_parts(file: BinaryIO) -> Iterator[bytes]:
    """Size, and samples at even distances: a pickle is not parsed."""
    size = file.seek(0, 2)
    yield struct.pack("<Q", size)
    num_samples = 256
    for index in range(num_samples):
        file.seek(max(0, size - SAMPLE_BYTES) * index // (num_samples - 1))
        yield file.read(SAMPLE_BYTES)
