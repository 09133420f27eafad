"""Opens a model at start: by an inspection answer, else by transformers' code."""

import logging
import time

import torch

from pdcluster_worker.model import arch_spec
from pdcluster_worker.model.families import UnsupportedArchError
from pdcluster_worker.model.loading.hf_inspect import (
    Inspection,
    InspectRequest,
    forget,
    start_inspection,
)
from pdcluster_worker.model.loading.loader import LoadedModel, load_model
from pdcluster_worker.system.cpu_limit import available_threads

logger = logging.getLogger(__name__)


def open_model(
    question: InspectRequest, block_size: int, inspection: Inspection | None = None
) -> LoadedModel:
    """inspection: started early; closed if it was for another request.  Raises ModelError."""
    if inspection is None or inspection.question != question:
        if inspection is not None:
            inspection.close()
        inspection = _inspected(question)
    loaded = None if inspection is None else _by_answer(inspection, block_size)
    return loaded or by_transformers(question, block_size)


def by_transformers(question: InspectRequest, block_size: int) -> LoadedModel:
    """Raises ModelError."""
    return load_model(
        question.path,
        question.dtype,
        block_size=block_size,
        max_model_len=question.max_model_len,
        threads=question.threads,
    )


def _inspected(question: InspectRequest) -> Inspection | None:
    try:
        return start_inspection(question)
    except OSError as e:
        logger.warning("transformers cannot be asked in a process of its own: %s", e)
        return None


def _by_answer(inspection: Inspection, block_size: int) -> LoadedModel | None:
    """None without a usable answer (logged)."""
    started = time.monotonic()
    question = inspection.question
    torch.set_num_threads(question.threads or available_threads())
    try:
        file = inspection.wait()
        answer = None if file is None else arch_spec.read_answer(file)
    except ValueError as e:
        logger.warning("%s", e)
        forget(question)
        return None
    finally:
        inspection.close()
    if answer is None:
        return None
    waited = time.monotonic() - started
    try:
        loaded = arch_spec.build(answer, question.path, block_size)
    except UnsupportedArchError as e:
        logger.info("the model is loaded by transformers' code, which is slower: %s", e)
        return None
    seconds, threads = time.monotonic() - started, torch.get_num_threads()
    text = "loaded model path=%s dtype=%s threads=%d seconds=%.1f answer=%s waited=%.1f"
    logger.info(
        text,
        question.path,
        question.dtype,
        threads,
        seconds,
        "kept" if inspection.is_kept else "asked",
        waited,
    )
    return loaded
