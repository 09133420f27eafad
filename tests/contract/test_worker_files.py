"""The files that the operator renders for a worker, read by the worker."""

from pathlib import Path

import pytest

from pdcluster_api.manifests.render import render_record, render_workload
from pdcluster_api.manifests.worker_config import conditions_file, policy_config
from pdcluster_schema.load import parse
from pdcluster_worker.config.policy import ConditionsFile, load_policy
from pdcluster_worker.config.worker import load_worker_config
from tests.operator.pdcluster_api.manifests.rendering import OWNER, workload_of
from tests.schema.object_cases import GOOD, Change, minimal


@pytest.mark.parametrize("change", GOOD.values(), ids=GOOD)
def test_workers_understand_their_two_files(change: Change, tmp_path: Path) -> None:
    document = minimal()
    change(document)
    cluster = parse(document)
    for role, spec in cluster.spec.roles.present().items():
        workload = workload_of(cluster, role, spec.pools[0].name)
        *_, config = render_workload(render_record(cluster, workload, OWNER, "worker:1"), 1, OWNER)
        engine, policy = tmp_path / "engine.yaml", tmp_path / "policy.yaml"
        engine.write_text(config["data"]["engine.yaml"])
        policy.write_text(policy_config(cluster, OWNER)["data"]["policy.yaml"])

        read = load_worker_config(engine)
        load_policy(policy)
        assert (read.cluster, read.role, read.pool, read.revision) == (
            workload.cluster,
            role,
            workload.pool,
            workload.revision,
        )


def test_workers_read_the_conditions_the_worst_first(tmp_path: Path) -> None:
    policy, since = tmp_path / "policy.yaml", "2026-01-02T03:04:05Z"
    given = [("Ready", "False", "Starting"), ("Serving", "True", "Answering")]
    given += [("DecodeReady", "False", "CrashLooping"), ("PrefillReady", "False", "Starting")]
    status = [
        {
            "type": kind,
            "status": state,
            "reason": reason,
            "message": f"{kind}: why",
            "lastTransitionTime": since,
            "observedGeneration": 7,
        }
        for kind, state, reason in given
    ]
    file = ConditionsFile(policy)
    assert file.current() is None

    (tmp_path / "conditions.json").write_text(conditions_file(status, "2026-01-02T04:00:00Z"))
    read = file.current()
    assert read is not None
    assert read.written == "2026-01-02T04:00:00Z"
    assert [(each.type, each.severity) for each in read.items] == [
        ("DecodeReady", "needs action"),
        ("Ready", "on the way"),
        ("PrefillReady", "on the way"),
        ("Serving", "fine"),
    ]
    assert (read.items[0].message, read.items[0].since) == ("DecodeReady: why", since)
    assert ConditionsFile(None).current() is None
