"""`python -m pdcluster_worker.fetch`: download a model of the hub, once per folder.

Exit status: 0 when the folder is complete, 2 when trying again would not help
(repository, revision, token, space), 1 when the hub could not be reached in
the given attempts; the last line on stderr, `error: ...`, says why.  143 at
SIGTERM, 130 at Ctrl-C: the next attempt goes on with what has come so far.

The operator sets two variables, which an older image ignores: PDCLUSTER_FETCH_WEIGHTS=false for
configuration, tokenizer and chat template alone, and PDCLUSTER_TOKEN_SECRET, the Secret that
HF_TOKEN or HUGGING_FACE_HUB_TOKEN comes from, to go no further without one.
"""

import argparse
import logging
import os
import sys
from pathlib import Path

from pdcluster_worker.errors import FetchError, HubError
from pdcluster_worker.fetch.model_folder import ModelDownload, meaning
from pdcluster_worker.system.process import end_on_sigterm, start_logging, terminate_with_parent

ATTEMPTS = 10
"""Failures in a row without one new byte: some five minutes until the caller sees it."""

ATTEMPTS_ON_A_TERMINAL = 3
"""A user waits, and starts it again."""

STOPPED = 130


def main() -> int:
    end_on_sigterm()
    arguments = _parser().parse_args()
    start_logging()
    if arguments.hub_cache:  # pdctl waits for it, and shows what it says
        terminate_with_parent()
        for handler in logging.getLogger().handlers:
            handler.setFormatter(logging.Formatter("%(message)s"))
    if arguments.bar:
        logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # a line per request
    has_weights = os.environ.get("PDCLUSTER_FETCH_WEIGHTS") != "false"
    download = ModelDownload(
        *(arguments.repo, arguments.revision, arguments.target.absolute(), has_weights),
        is_adapter=arguments.adapter,
        gguf=arguments.gguf,
    )
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        folder = _folder(download, arguments)
        if arguments.hub_cache:
            print(folder)
    except KeyboardInterrupt:
        sys.stderr.write("stopped; start it again to go on with what has come\n")
        return STOPPED
    except (FetchError, HubError) as e:
        return _print_result(download, str(e), 2 if isinstance(e, FetchError) else 1)
    except OSError as e:
        return _print_result(download, meaning(e, download.target), 2)
    return 0


def _folder(download: ModelDownload, arguments: argparse.Namespace) -> Path:
    """The folder that has it now, or its GGUF file."""
    if download.is_there():
        return download.target
    _set_token(os.environ.get("PDCLUSTER_TOKEN_SECRET"))
    # the hub's client takes a second to import
    from pdcluster_worker.fetch.download import fetch
    from pdcluster_worker.fetch.hf_hub import cached_snapshot

    if arguments.hub_cache and (cached := cached_snapshot(download)) is not None:
        return cached
    fetch(download, arguments.attempts, bar=arguments.bar)
    return download.target


def _set_token(secret: str | None) -> None:
    """Pass on the token under the name that the hub's client reads.  Raises FetchError."""
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if token:
        os.environ["HF_TOKEN"] = token
    elif secret is not None:
        raise FetchError(
            f"there is no Secret {secret}, or it has neither of the keys HF_TOKEN and token: give "
            "it one with the hub's token, or leave huggingFace.tokenSecret out"
        )


def _print_result(download: ModelDownload, reason: str, status: int) -> int:
    sys.stderr.write(f"error: {download.repo} at {download.revision}: {reason}\n")
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pdcluster_worker.fetch",
        description="Download a model of the Hugging Face hub.",
    )
    parser.add_argument("--repo", required=True, help="OWNER/NAME")
    parser.add_argument("--revision", default="main", help="commit, tag or branch (default: main)")
    parser.add_argument(
        "--target",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder to make, of its own for each revision",
    )
    parser.add_argument("--adapter", action="store_true", help="it is a LoRA adapter")
    parser.add_argument(
        "--gguf",
        metavar="QUANTIZATION",
        help="the GGUF file of that; empty = its only one, of a repository without another model",
    )
    parser.add_argument(
        "--attempts",
        type=int,
        default=ATTEMPTS_ON_A_TERMINAL if sys.stderr.isatty() else ATTEMPTS,
        help="failures in a row without a new byte before giving up",
    )
    parser.add_argument(
        "--hub-cache",
        action="store_true",
        help="take the copy of the hub's own cache where that is whole; prints its path",
    )
    parser.add_argument("--bar", action="store_true", help="a bar in place of a log")
    return parser


if __name__ == "__main__":
    sys.exit(main())
