"""Files that a worker needs: config, tokenizer, chat template and safetensors of the root."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdcluster_worker.errors import FetchError

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
_CONFIG = "config.json"
_SMALL = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|tokenizer\.model|spiece\.model|sentencepiece\.bpe\.model|merges\.txt|vocab\.txt|chat_template\.jinja|[\w.-]+\.tiktoken"
)


@dataclass(frozen=True)
class RemoteFile:
    """size: bytes, None = the hub does not say; sha256: of large files alone."""

    name: str
    size: int | None = None
    sha256: str | None = None


def small_files(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Everything but weights, the index of the weights included.

    Raises FetchError for a repository without config.json.
    """
    found = [file for file in files if _SMALL.fullmatch(file.name) or file.name == INDEX]
    if _CONFIG not in (file.name for file in found):
        raise FetchError(
            "it has no config.json at its root, so it is no model of transformers: choose another "
            "repository"
        )
    return found


def weights_files(files: Sequence[RemoteFile], index: bytes | None) -> list[RemoteFile]:
    """The safetensors: those that the index names, else the one file.

    Raises FetchError when they are not there.
    """
    by_name = {file.name: file for file in files}
    needed = [WEIGHTS] if index is None else sorted(_shards(index))
    missing = [name for name in needed if name not in by_name or "/" in name]
    if missing:
        others = (
            ", ".join(
                sorted(
                    name
                    for name in by_name
                    if name.endswith((".bin", ".pth", ".gguf", ".safetensors"))
                )[:5]
            )
            or "none"
        )
        raise FetchError(
            f"it has no {missing[0]} (weights there: {others}): choose a repository or revision "
            "with safetensors weights"
        )
    return [by_name[name] for name in needed]


def _shards(index: bytes) -> set[str]:
    try:
        return set(json.loads(index)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise FetchError(
            f"its {INDEX} cannot be read ({type(e).__name__}: {e}): choose another revision"
        ) from e
