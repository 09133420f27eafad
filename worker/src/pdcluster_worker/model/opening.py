"""Opens a model at start: by transformers' answer where there is one, else by
transformers' code.
"""

import logging
import time

import torch

from pdcluster_worker.machine.cpu_limit import available_threads
from pdcluster_worker.model import skeleton
from pdcluster_worker.model.families import NotOursError
from pdcluster_worker.model.loading.answers import Asked, Question, ask, forget
from pdcluster_worker.model.loading.loader import LoadedModel, load_model

logger = logging.getLogger(__name__)


def open_model(question: Question, block_size: int, asked: Asked | None = None) -> LoadedModel:
    """Load a model.  asked: what was asked early; another question is asked again.

    Raises ModelError with the reason when it is missing or cannot be served.
    """
    if asked is None or asked.question != question:
        if asked is not None:
            asked.close()
        asked = _asked(question)
    loaded = None if asked is None else _by_answer(asked, block_size)
    return loaded or by_transformers(question, block_size)


def by_transformers(question: Question, block_size: int) -> LoadedModel:
    """Load a model by transformers' code, whose module can compute.  Raises ModelError."""
    return load_model(
        question.path,
        question.dtype,
        block_size=block_size,
        max_model_len=question.max_model_len,
        threads=question.threads,
    )


def _asked(question: Question) -> Asked | None:
    try:
        return ask(question)
    except OSError as e:
        logger.warning("transformers cannot be asked in a process of its own: %s", e)
        return None


def _by_answer(asked: Asked, block_size: int) -> LoadedModel | None:
    """The model of this answer; None when it has none, which the log says."""
    started = time.monotonic()
    question = asked.question
    torch.set_num_threads(question.threads or available_threads())
    try:
        file = asked.wait()
        answer = None if file is None else skeleton.read_answer(file)
    except ValueError as e:
        logger.warning("%s", e)
        forget(question)
        return None
    finally:
        asked.close()
    if answer is None:
        return None
    waited = time.monotonic() - started
    try:
        loaded = skeleton.build(answer, question.path, block_size)
    except NotOursError as e:
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
        "kept" if asked.is_kept else "asked",
        waited,
    )
    return loaded
