"""The Hugging Face hub: what a repository holds, which of it a worker needs (config, tokenizer,
chat template and safetensors of the root), and the bytes of a file from any position on.

It fails by FetchError, which a user must fix, or by HubError, after which it is tried again.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented there, without saying so to mypy
    build_hf_headers,
    get_session,
    hf_raise_for_status,
)

from pdcluster_schema.text import one_line
from pdcluster_worker.errors import FetchError, HubError
from pdcluster_worker.fetch.model_folder import ModelDownload

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.json"
_CONFIG = "config.json"
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_SMALL = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|tokenizer\.model|spiece\.model|sentencepiece\.bpe\.model|merges\.txt|vocab\.txt|chat_template\.jinja|[\w.-]+\.tiktoken"
)

SILENCE_SECONDS = 30.0
"""A hub that sends nothing for so long has lost the connection."""

_TRY_AGAIN = frozenset({408, 425, 429})


@dataclass(frozen=True)
class RemoteFile:
    """size: bytes, None = the hub does not say; sha256: of large files alone."""

    name: str
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class RepoListing:
    """Files of a revision now.  commit: the one that the revision's name stands for."""

    commit: str
    files: tuple[RemoteFile, ...]


class Hub:
    """One repository.  Every method raises FetchError or HubError."""

    def __init__(self, repo: str, revision: str) -> None:
        self._repo = repo
        self._revision = revision

    def listing(self) -> RepoListing:
        with self._errors():
            info = HfApi().model_info(
                self._repo, revision=self._revision, files_metadata=True, timeout=SILENCE_SECONDS
            )
        if info.sha is None:
            raise HubError(f"{constants.ENDPOINT} named no commit of {self._repo}")
        files = (
            RemoteFile(one.rfilename, one.size, one.lfs.sha256 if one.lfs else None)
            for one in info.siblings or ()
        )
        return RepoListing(info.sha, tuple(files))

    @contextmanager
    def read(self, commit: str, name: str, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """(position of the first byte, chunks): from `start`, or from 0 when the hub cannot begin
        in the middle.
        """
        url = hf_hub_url(self._repo, name, revision=commit)
        headers = {**build_hf_headers(), "accept-encoding": "identity"}
        if start:
            headers["range"] = f"bytes={start}-"
        with (
            self._errors(),
            get_session().stream(
                "GET", url, headers=headers, timeout=SILENCE_SECONDS, follow_redirects=True
            ) as response,
        ):
            hf_raise_for_status(response)
            yield (
                start if response.status_code == httpx2.codes.PARTIAL_CONTENT else 0,
                response.iter_bytes(),
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except HFValidationError as e:
            raise _no_name(self._repo, e) from e
        except HfHubHTTPError as e:
            status = e.response.status_code
            if status in _TRY_AGAIN or status >= 500:
                raise HubError(f"{constants.ENDPOINT} answered {status} for {self._repo}") from e
            raise FetchError(
                f"{constants.ENDPOINT} answered {status} for {self._repo}: "
                f"{self._meaning(e, status)}"
            ) from e
        except httpx2.ConnectError as e:
            raise HubError(
                f"{constants.ENDPOINT} cannot be reached ({e}): check the network, and HTTPS_PROXY "
                "or HF_ENDPOINT where it needs a proxy or a mirror"
            ) from e
        except httpx2.HTTPError as e:
            raise HubError(
                f"the connection to {constants.ENDPOINT} failed: {type(e).__name__}: {e}"
            ) from e

    def _meaning(self, error: HfHubHTTPError, status: int) -> str:
        if isinstance(error, RevisionNotFoundError):
            return f"it has no revision {self._revision!r}: check the model's revision"
        if isinstance(error, GatedRepoError) or status == 403:
            return (
                "access to it is not granted: ask for it on the repository's page, with the "
                "account of the token"
            )
        token = (
            "the token (HF_TOKEN) may not read it"
            if os.environ.get("HF_TOKEN")
            else "it is private and no token (HF_TOKEN) is given"
        )
        if status in (401, 404):
            return f"there is no such repository, or {token}: check the model's repo and its token"
        return one_line(error)


def _no_name(repo: str, error: HFValidationError) -> FetchError:
    return FetchError(f"{repo!r} is not the name of a repository, as in OWNER/NAME: {error}")


def cached_snapshot(download: ModelDownload) -> Path | None:
    """The hub client's own copy, where it has all that a worker needs: a folder, or a GGUF file.

    Raises FetchError for what is no name of a repository.
    """
    try:
        folder = Path(
            snapshot_download(download.repo, revision=download.revision, local_files_only=True)
        )
        files = [RemoteFile(path.name) for path in folder.iterdir() if path.exists()]
        has_other = any(file.name in (TOKENIZER, INDEX, WEIGHTS) for file in files)
        gguf = gguf_file(files, download.gguf) if download.gguf or not has_other else None
        if gguf is not None:
            return folder / gguf.name
        if download.is_adapter:
            adapter_files(files)
            return folder
        index = folder / INDEX
        names = {file.name for file in small_files(files)}
        weights_files(files, index.read_bytes() if index.exists() else None)
    except HFValidationError as e:
        raise _no_name(download.repo, e) from e
    except (LocalEntryNotFoundError, FetchError):
        return None
    # Other programs leave some small files out, which a download brings.
    return folder if {TOKENIZER, "tokenizer_config.json"} <= names else None


def small_files(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """All but weights, their index included.  Raises FetchError without a config.json."""
    found = [file for file in files if _SMALL.fullmatch(file.name) or file.name == INDEX]
    if _CONFIG not in (file.name for file in found):
        reason = "it has no config.json at its root, so it is no model of transformers"
        others = "GGUF files are for `pdctl up` alone: " if _ggufs(files) else ""
        raise FetchError(f"{reason}: {others}choose another repository")
    return found


def gguf_file(files: Sequence[RemoteFile], quantization: str | None) -> RemoteFile | None:
    """The GGUF file of a quantization, as in model-Q4_K_M.gguf, or of that name; empty = the only
    one.

    None where none is asked for, or a quantization is not and there is another model.
    Raises FetchError where there is not one such file.
    """
    found = _ggufs(files)
    has_other = any(file.name == _CONFIG for file in files)
    if quantization is None or (not quantization and (has_other or not found)):
        return None
    name = re.escape(re.sub(r"\.gguf$", "", quantization, flags=re.IGNORECASE))
    ending = re.compile(rf"(.*[-._])?{name}\.gguf", re.IGNORECASE)
    chosen = [file for file in found if not quantization or ending.fullmatch(file.name)]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(file.name for file in (chosen or found)) or "none"
    kind = f" of {quantization}" if quantization else ""
    # more than a quantization where two files have it
    example = chosen[0].name[: -len(".gguf")] if chosen and quantization else "Q4_K_M"
    raise FetchError(
        f"it has {'several' if chosen else 'no'} GGUF files{kind} in one part ({names}): give "
        f"OWNER/NAME:QUANTIZATION, as in OWNER/NAME:{example}"
    )


def _ggufs(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Whole models, without parts of one and encoders of images."""
    names = re.compile(r"(?!mmproj)[^/]*(?<!\d{5}-of-\d{5})\.gguf", re.IGNORECASE)
    return sorted((one for one in files if names.fullmatch(one.name)), key=lambda one: one.name)


def adapter_files(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Settings and weights of a LoRA adapter.  Raises FetchError without them."""
    by_name = {file.name: file for file in files}
    if missing := [name for name in _ADAPTER if name not in by_name]:
        raise FetchError(
            f"it has no {missing[0]} at its root, so it is no LoRA adapter of PEFT with weights in "
            "safetensors: choose another repository or revision"
        )
    return [by_name[name] for name in _ADAPTER]


def weights_files(files: Sequence[RemoteFile], index: bytes | None) -> list[RemoteFile]:
    """The safetensors that the index names, else the one file.  Raises FetchError without them."""
    by_name = {file.name: file for file in files}
    try:
        needed = [WEIGHTS] if index is None else sorted({*json.loads(index)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise FetchError(
            f"its {INDEX} cannot be read ({type(e).__name__}: {e}): choose another revision"
        ) from e
    missing = [name for name in needed if name not in by_name or "/" in name]
    if missing:
        formats = (".bin", ".pth", ".gguf", ".safetensors")
        others = ", ".join(sorted(name for name in by_name if name.endswith(formats))[:5])
        raise FetchError(
            f"it has no {missing[0]} (weights there: {others or 'none'}): choose a repository or "
            "revision with safetensors weights"
        )
    return [by_name[name] for name in needed]
