"""`python -m pdcluster_worker.fetch.gguf_file FILE TARGET`: make a model folder of a GGUF file.

transformers reads the file.  What it would read wrongly, or leave out, is refused by name before.
Exit status: 0 when the folder is complete; 2 where the file is refused or the disk is full, 1 where
the converter is not installed; the last line on stderr, `error: ...`, says why.
"""

import argparse
import errno
import functools
import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pdcluster_schema.text import one_line
from pdcluster_worker.errors import FetchError
from pdcluster_worker.fetch.model_folder import LOG_SECONDS, check_space, make_once, meaning
from pdcluster_worker.system.process import end_on_sigterm, terminate_with_parent

logger = logging.getLogger("pdcluster_worker.fetch.gguf_file")  # also of a program

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma")
"""Those that were compared with the model that the file was made of (tests/worker/fetch)."""

OTHER_SOURCE = "give the model's original folder or its name on the hub"
# what these files lack, or why the original folder is no way out
_NOT_CONVERTED = {
    "gemma2": "which only `engine.type: vllm` serves (its attention logits are capped)",
    "gemma3": "which leaves out the layers with a window, their rotary base and the scale of "
    "queries",
}
_UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")
_PART = re.compile(r".*-\d{5}-of-\d{5}")
_ARCHITECTURE = "general.architecture"
# fields that the tensors' shapes imply, or that say nothing of the computation
_IMPLIED = frozenset({"attention.key_length", "attention.value_length", "vocab_size"})
_SCALED_ROPE = ("rope_freqs", "rope_factors")
_WEIGHT_BYTES = 2  # of bfloat16


def convert(gguf: Path, folder: Path, *, bar: bool = False) -> None:
    """Write config, tokenizer and weights in bfloat16 into an empty folder.  Raises FetchError."""
    if _PART.fullmatch(gguf.stem):
        raise FetchError(
            f"{gguf.name} is one part of a model: join its parts (llama-gguf-split --merge), or "
            f"{OTHER_SOURCE}"
        )
    try:
        reader = _checked(gguf, folder)
        logger.info("converting %s, once", gguf.name)
        _save(gguf, folder, reader, bar=bar)
    except (FetchError, OSError, ImportError):
        raise
    except Exception as e:  # of the readers, which raise whatever a broken file leads to
        if "No space left" in str(e):  # safetensors' own error
            raise FetchError(_no_space(folder)) from e
        raise FetchError(
            f"{gguf} cannot be converted ({type(e).__name__}: {one_line(e)}): get the file again, "
            f"or {OTHER_SOURCE}"
        ) from e


def _checked(gguf: Path, folder: Path) -> Any:
    """A reader of the file.

    Raises FetchError for what the conversion would get wrong, or has no space for.
    """
    import gguf as format_

    _teach_gemma()
    if not gguf.is_file():
        raise FetchError(f"{gguf} is no file: correct the path")
    reader = _opened(format_, gguf)
    if reasons := list(_reasons(format_, reader)):
        text = "; ".join(reasons)
        raise FetchError(f"{gguf.name} is not converted: {text}: {OTHER_SOURCE}")
    num_values = sum(int(tensor.n_elements) for tensor in reader.tensors)
    check_space(folder, num_values * _WEIGHT_BYTES)
    return reader


def _opened(format_: Any, gguf: Path) -> Any:
    """Raises FetchError."""
    try:
        return format_.GGUFReader(gguf)
    except OSError:
        raise
    except Exception as e:  # of a library that reads on until something breaks
        if kind := _UNKNOWN_TYPE.search(str(e)):
            reason = f"the type {kind[1]} of one of its tensors is not known"
            raise FetchError(f"{gguf.name} is not converted: {reason}: {OTHER_SOURCE}") from e
        with gguf.open("rb") as file:
            begin = file.read(8)
        magic, version = begin[:4], int.from_bytes(begin[4:], "little")
        if (
            magic == b"GGUF"
            and len(begin) == 8
            and version not in format_.gguf_reader.READER_SUPPORTED_VERSIONS
        ):
            known = " and ".join(map(str, format_.gguf_reader.READER_SUPPORTED_VERSIONS))
            reason = f"it is of version {version} of the format, and {known} are known"
            raise FetchError(f"{gguf.name} is not converted: {reason}: {OTHER_SOURCE}") from e
        reason = "is cut off" if magic == b"GGUF" else "is no GGUF file"
        raise FetchError(f"{gguf} {reason}: get the file again, or {OTHER_SOURCE}") from e


def _teach_gemma() -> None:
    """transformers reads the files of later Gemmas alone; the first has less, and no window."""
    from transformers import modeling_gguf_pytorch_utils as loader

    fields = dict(loader.GGUF_CONFIG_MAPPING["gemma2"])
    del fields["attention.sliding_window"]
    loader.GGUF_CONFIG_MAPPING["gemma"] = fields
    loader.GGUF_SUPPORTED_ARCHITECTURES.append("gemma")
    loader.TENSOR_PROCESSORS["gemma"] = loader.TENSOR_PROCESSORS["gemma2"]


def _reasons(format_: Any, reader: Any) -> Iterator[str]:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    field = reader.get_field(_ARCHITECTURE)
    architecture = field.contents() if field is not None else "missing"
    if architecture not in ARCHITECTURES:
        why = _NOT_CONVERTED.get(architecture, f"not one of {', '.join(ARCHITECTURES)}")
        yield f"its architecture is {architecture}, {why}"
        return
    types = {tensor.tensor_type: tensor for tensor in reader.tensors}
    for kind, tensor in types.items():
        try:
            format_.dequantize(tensor.data[:1], kind)
        except NotImplementedError:
            yield f"the type {kind.name} of its tensor {tensor.name} is not known"
    prefix, known = f"{architecture}.", GGUF_CONFIG_MAPPING[architecture]
    for name in reader.fields:
        own = name.removeprefix(prefix)
        if own != name and own not in known and own not in _IMPLIED:
            yield f"its field {name} would be lost"
    for tensor in reader.tensors:
        if tensor.name.startswith(_SCALED_ROPE):
            yield f"the scaling of its rotary embedding ({tensor.name}) would be lost"


def _number(reader: Any, name: str) -> int | None:
    field = reader.get_field(name)
    return None if field is None else int(field.contents())


def _save(gguf: Path, folder: Path, reader: Any, *, bar: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    _quieten(bar=bar)
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    config = AutoConfig.from_pretrained(**source)
    if config.model_type not in ARCHITECTURES:  # by its name, and with windows that it has not
        raise FetchError(
            f"{gguf.name} is not converted: transformers takes it for {config.model_type}, with "
            f"other settings: {OTHER_SOURCE}"
        )
    if head_dim := _number(reader, f"{config.model_type}.attention.key_length"):
        config.head_dim = head_dim
    model, found = AutoModelForCausalLM.from_pretrained(
        **source, config=config, dtype=torch.bfloat16, output_loading_info=True
    )
    lost = sorted({*found["missing_keys"], *found["unexpected_keys"]})
    if lost:
        raise FetchError(
            f"{gguf.name} is not converted: its tensors are not those of the model (of "
            f"{len(lost)} {lost[0]}): {OTHER_SOURCE}"
        )
    # The weights are plain now; what says otherwise makes save_pretrained refuse.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    ends = {config.eos_token_id, _number(reader, "tokenizer.ggml.eot_token_id")} - {None}
    model.generation_config.eos_token_id = sorted(ends) or None
    model.save_pretrained(folder)


def _quieten(*, bar: bool) -> None:
    """One bar, that of the tensors, or a line now and then."""
    from transformers import modeling_gguf_pytorch_utils as loader
    from transformers.utils import logging as library

    library.set_verbosity_error()
    library.disable_progress_bar()
    plain = loader.tqdm
    shown = functools.partial(plain, desc="convert", unit="tensor") if bar else _logged
    loader.tqdm = functools.wraps(plain)(lambda each, **_: shown(each))


def _logged(tensors: Sequence[Any]) -> Iterator[Any]:
    at = time.monotonic()
    for number, tensor in enumerate(tensors):
        if (now := time.monotonic()) - at >= LOG_SECONDS:
            logger.info("converting tensors=%d of=%d", number, len(tensors))
            at = now
        yield tensor


def _no_space(folder: Path) -> str:
    return meaning(OSError(errno.ENOSPC, "no space"), folder)


def main() -> int:
    end_on_sigterm()
    terminate_with_parent()  # pdctl waits for it
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("pdcluster_worker").setLevel(logging.INFO)
    parser = argparse.ArgumentParser(
        prog="python -m pdcluster_worker.fetch.gguf_file", description="Convert a GGUF file, once."
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("target", type=Path, help="folder to make")
    parser.add_argument("--bar", action="store_true", help="show how far it is")
    arguments = parser.parse_args()
    target = arguments.target.absolute()
    try:
        file, bar = arguments.file, arguments.bar
        make_once(target, lambda folder: convert(file, folder, bar=bar), file)
    except KeyboardInterrupt:
        return 130
    except FetchError as e:
        return _failed(str(e), 2)
    except OSError as e:
        return _failed(meaning(e, target), 2)
    except ImportError as e:
        return _failed(f"{e}: install it: pip install 'pdcluster-worker[gguf]'", 1)
    return 0


def _failed(reason: str, status: int) -> int:
    sys.stderr.write(f"error: {reason}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
