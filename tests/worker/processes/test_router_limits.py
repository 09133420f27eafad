"""A router's facts about its model before it has seen a decode worker."""

import json
from pathlib import Path

import pytest

from pdcluster_worker.errors import ModelError
from pdcluster_worker.processes.router_process import model_limits


def folder_of(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("config", "setting", "limits"),
    [
        ({"max_position_embeddings": 512, "vocab_size": 9}, None, (512, 9)),
        ({"max_position_embeddings": 512, "vocab_size": 9}, 100, (100, 9)),
        ({"text_config": {"max_position_embeddings": 64, "vocab_size": 8}}, None, (64, 8)),
        ({"vocab_size": 9}, 100, (100, 9)),
        ({"max_position_embeddings": 9}, None, (9, 0)),
        (
            {"llm_config": {"max_position_embeddings": 9, "vocab_size": 7}, "text_config": None},
            None,
            (9, 7),
        ),
    ],
)
def test_router_limits_are_those_of_the_model_and_the_setting(tmp_path, config, setting, limits):
    assert model_limits(folder_of(tmp_path, config), setting) == limits


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"vocab_size": 9}, "names no max_position_embeddings: set engine.maxModelLen"),
        ([], "config.json: cannot be read"),
    ],
)
def test_router_refuses_a_model_folder_that_does_not_say(tmp_path, config, reason):
    with pytest.raises(ModelError, match=reason):
        model_limits(folder_of(tmp_path, config), None)


def test_router_refuses_a_missing_model_folder(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        model_limits(tmp_path, None)
