"""Prompts and steps of engines with tiers below the pool."""

from pdcluster_worker.messages import engine as m
from pdcluster_worker.messages.block_hash import block_hashes
from tests.worker.engine.conftest import make_spec

LONG = list(range(40))  # ten blocks of four tokens, of which nine can be a hit
OTHER = list(range(100, 140))
MORE = list(range(600, 640))


def hashes(rig, prompt):
    return block_hashes(prompt, rig.settings.block_size)


def ask(rig, name, prompt, max_tokens=2):
    rig.handle(m.Submit(make_spec(name, prompt, max_tokens)))


def finish(rig, limit=60):
    """Steps and copies until nothing is left to do."""
    for _ in range(limit):
        rig.tiers.copy()
        rig.step()
        if not (rig.core.has_work or rig.tiers.queued or rig.core._tiers.num_reading):
            return
    raise AssertionError("the engine does not come to rest")


def check_answer(rig, name, prompt):
    answer = rig.token_ids(name)
    assert answer == rig.runner.reference(prompt, len(answer))
