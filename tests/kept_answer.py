"""transformers' answer about a model, made in this process, which has imported it anyway, and not
in one of its own.
"""

from pathlib import Path

from pdcluster_worker.model.hf_inspect_process import inspect_once
from pdcluster_worker.model.loading.hf_inspect import InspectRequest, folder_of_answers
from pdcluster_worker.system.native_dtype import DType


def keep_answer(folder: Path, dtype: DType, max_model_len: int | None = None) -> None:
    """Opening the model with these settings then starts no process to ask."""
    question = InspectRequest(folder, dtype, max_model_len, threads=1)
    kept = folder_of_answers()
    kept.mkdir(parents=True, exist_ok=True)
    assert inspect_once(kept / f"{question.key()}.safetensors", question) == 0
