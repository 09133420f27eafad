"""Speculative decoding: the next step of the model verifies guesses of later tokens together."""

from pdcluster_worker.engine.speculation.draft_model import DraftSizes, ModelDrafter
from pdcluster_worker.engine.speculation.ngram import NgramDrafter
from pdcluster_worker.engine.speculation.speculation import Speculation

__all__ = ["DraftSizes", "ModelDrafter", "NgramDrafter", "Speculation"]
