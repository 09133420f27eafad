"""`pdctl plan` on files: what it prints, and what it refuses.  With a cluster: tests/apiserver."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pdctl.cli.main import app
from tests.schema.object_cases import Change, at, minimal


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Any]:
    """Run it on the minimal object with a change, against the minimal object."""

    def run(*changes: Change) -> Any:
        new = minimal()
        for change in changes:
            change(new)
        for name, document in (("new", new), ("old", minimal())):
            (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
        return CliRunner().invoke(
            app, ["plan", "-f", str(tmp_path / "new.yaml"), "--against", str(tmp_path / "old.yaml")]
        )

    return run


def test_nothing_is_said_to_change_where_nothing_does(plan: Callable[..., Any]):
    result = plan()

    assert result.exit_code == 0
    assert result.output.startswith("chat (namespace default): nothing would change; revision ")


def test_a_new_revision_is_shown_with_its_accelerators(plan: Callable[..., Any]):
    result = plan(
        at("spec.engine.maxSequences", 32), at("spec.routing.offload.minOffloadLength", 1)
    )
    lines = result.output.splitlines()

    assert result.exit_code == 0
    assert lines[0] == "chat (namespace default): 2 fields would change."
    assert lines[2:5] == [
        "FIELD                                  NOW  THEN  TAKES EFFECT",
        "spec.engine.maxSequences               64   32    new workers: a new revision",
        "spec.routing.offload.minOffloadLength  64   1     policy: in a minute or two, without a "
        "restart",
    ]
    assert "A new revision follows: " in result.output
    assert "cpu            2          4      2      2" in lines
    assert (
        "Meanwhile 2 cpu more must be free; rollout.strategy Recreate needs none beside the old."
        in lines
    )
    assert max(map(len, lines)) <= 100


def test_recreate_says_that_nothing_answers_meanwhile(plan: Callable[..., Any]):
    result = plan(at("spec.engine.maxSequences", 32), at("spec.rollout.strategy", "Recreate"))

    assert (
        "by Recreate: the old workers end first, and\nnothing answers until the new ones are ready."
        in result.output
    )
    assert "Meanwhile" not in result.output


def test_policy_alone_replaces_no_worker(plan: Callable[..., Any]):
    result = plan(at("spec.routing.offload.minOffloadLength", 1))

    text = " ".join(result.output.split())
    assert (
        "stays, and no worker is replaced. Policy reaches the workers in a minute or two, without "
        "a restart." in text
    )


def test_pools_that_come_and_go_are_marked(plan: Callable[..., Any]):
    result = plan(at("spec.roles.decode.pools", [{"name": "new", "replicas": 3}]))

    assert [line.split() for line in result.output.splitlines() if line.startswith("decode/")] == [
        ["decode/new", "cpu", "-", "3", "comes"],
        ["decode/cpu", "cpu", "1", "-", "goes"],
    ]


@pytest.mark.parametrize(
    ("mode", "before", "text"),
    [
        (
            "On",
            "Off",
            "autoscale.mode is On: THEN is what the autoscaler begins with, whatever the load is; "
            "from there it decides by metrics.",
        ),
        (
            "Off",
            "On",
            "autoscale.mode was On and is Off: pools keep their sizes until a scale request or "
            "their replicas change",
        ),
        (
            "Advise",
            "Off",
            "autoscale.mode is Advise: status.autoscaling shows what would be done, and nothing "
            "is.",
        ),
        ("Off", "Off", None),
    ],
)
def test_the_writer_that_decides_the_sizes_is_named(
    mode: str, before: str, text: str | None, tmp_path: Path
):
    for name, value in (("new", mode), ("old", before)):
        document = minimal()
        ratio, budget = {"min": 9 if name == "new" else 1}, {"total": 20}
        at("spec.autoscale", {"mode": value, "ratio": ratio, "budget": budget})(document)
        at("spec.roles.prefill.pools.0.maxReplicas", 2)(document)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
    result = CliRunner().invoke(
        app, ["plan", "-f", str(tmp_path / "new.yaml"), "--against", str(tmp_path / "old.yaml")]
    )
    said = " ".join(result.output.split())

    assert result.exit_code == 0
    assert (
        text in said
        if text
        else not any(
            word in said for word in ("what the autoscaler begins with", "mode was", "is Advise")
        )
    )
    assert ("RatioConstraintViolated: " in said) is (mode == "On")
    assert ("nothing while autoscale.mode is Off" in said) is (mode == "Off")


def test_long_values_are_cut(plan: Callable[..., Any]):
    result = plan(at("spec.model.path", "/models/" + "x" * 60))

    assert "/models/xxxxxxxxxxxxx...  new workers: a new revision" in result.output


def test_what_cannot_change_is_exit_2_after_the_rest(plan: Callable[..., Any]):
    result = plan(at("spec.roles.decode.pools.0.gpu", "B300"))

    assert result.exit_code == 2
    assert result.stdout.startswith("chat (namespace default): 1 field would change.")
    assert (
        result.stderr.splitlines()[0]
        == "The API server would refuse it, and nothing of this would happen:"
    )
    assert (
        "spec.roles.decode.pools[0].gpu: of the pool cpu cannot change from cpu to B300"
        in result.stderr
    )


def test_another_object_is_refused(plan: Callable[..., Any]):
    result = plan(at("metadata.name", "talk"))

    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        "metadata.name: is 'talk', and 'chat' in the file to compare with: that is another object"
        in result.stderr
    )


def test_a_file_that_is_not_valid_is_refused_by_the_rules_of_kubernetes(plan: Callable[..., Any]):
    assert (
        "new.yaml: spec.engine.threads: must be a whole number"
        in plan(at("spec.engine.threads", "two")).stderr
    )
    result = plan(at("spec.model.path", "~/llm"))

    assert (
        result.exit_code,
        "spec.model.path: must begin with /, not '~/llm'" in result.stderr,
    ) == (2, True)


def test_a_file_to_compare_with_that_is_not_there_is_named(tmp_path: Path):
    path = tmp_path / "new.yaml"
    path.write_text(yaml.safe_dump(minimal()))
    result = CliRunner().invoke(
        app, ["plan", "-f", str(path), "--against", str(tmp_path / "old.yaml")]
    )

    assert (
        result.exit_code,
        "old.yaml: cannot be read: No such file or directory" in result.stderr,
    ) == (2, True)


def test_a_namespace_that_is_not_the_files_is_refused(tmp_path: Path):
    document = minimal()
    at("metadata.namespace", "a")(document)
    path = tmp_path / "new.yaml"
    path.write_text(yaml.safe_dump(document))
    result = CliRunner().invoke(app, ["plan", "-f", str(path), "-n", "b"])

    assert (result.exit_code, result.stderr) == (
        2,
        "error: the file's metadata.namespace is a, and --namespace is b; leave one out, or make "
        "them equal\n",
    )
