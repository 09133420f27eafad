"""The two files that the operator renders for a worker, read by the worker."""

from pathlib import Path

import pytest

from pdcluster_api.manifests.render import render_record, render_workload
from pdcluster_api.manifests.worker_config import policy_config
from pdcluster_schema.load import parse
from pdcluster_worker.config.policy import load_policy
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
        _, config = render_workload(render_record(cluster, workload, OWNER, "worker:1"), 1, OWNER)
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
