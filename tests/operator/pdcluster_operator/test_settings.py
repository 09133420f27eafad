"""Settings from the environment: every fault at once, each with its variable and the fix, before
anything starts.
"""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pdcluster_api.errors import StartError
from pdcluster_operator.settings import Settings

NEEDED = {"PDCLUSTER_WORKER_IMAGE": "worker:1", "PDCLUSTER_ETCD_IMAGE": "etcd:1"}


def test_defaults_are_those_of_an_installation_for_the_whole_cluster():
    settings = Settings.from_environment(
        {**NEEDED, "POD_NAME": "operator-0", "POD_NAMESPACE": "system"}
    )
    assert (settings.worker_image, settings.etcd_image) == ("worker:1", "etcd:1")
    assert (settings.identity, settings.namespace, settings.watch_namespaces) == (
        "operator-0",
        "system",
        (),
    )
    assert settings.log_format == "text"
    assert (settings.lease_name, settings.cluster_domain) == ("pdcluster-operator", "cluster.local")
    assert (settings.resync_seconds, settings.concurrency, settings.http_port) == (300.0, 4, 8080)
    assert settings.watch_silence_seconds == 70.0
    assert (settings.log_level, settings.leader_election, settings.kubeconfig) == (
        logging.INFO,
        True,
        None,
    )


def test_every_variable_counts():
    given = {
        **NEEDED,
        "PDCLUSTER_WATCH_NAMESPACES": "a, b,,",
        "PDCLUSTER_RESYNC_SECONDS": "1.5",
        "PDCLUSTER_WATCH_SILENCE_SECONDS": "5",
        "PDCLUSTER_CONCURRENCY": "8",
        "PDCLUSTER_HTTP_PORT": "0",
        "PDCLUSTER_LOG_LEVEL": "Debug",
        "PDCLUSTER_LEADER_ELECTION": "FALSE",
        "PDCLUSTER_LOG_FORMAT": "JSON",
        "PDCLUSTER_LEASE_NAME": "team-a",
        "PDCLUSTER_CLUSTER_DOMAIN": "k8s.example.org",
        "KUBECONFIG": "/some/file",
    }
    settings = Settings.from_environment(given)
    assert (settings.watch_namespaces, settings.resync_seconds, settings.concurrency) == (
        ("a", "b"),
        1.5,
        8,
    )
    assert settings.watch_silence_seconds == 5.0
    assert (settings.http_port, settings.log_level, settings.leader_election) == (
        0,
        logging.DEBUG,
        False,
    )
    assert settings.log_format == "json"
    assert (settings.lease_name, settings.cluster_domain) == ("team-a", "k8s.example.org")
    assert settings.kubeconfig == Path("/some/file")


def test_in_a_pod_the_service_account_counts_whatever_kubeconfig_is_set():
    settings = Settings.from_environment(
        {**NEEDED, "KUBECONFIG": "/some/file", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    )
    assert settings.kubeconfig is None


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("PDCLUSTER_WORKER_IMAGE", "", "give it the image of workers"),
        ("PDCLUSTER_ETCD_IMAGE", "", "give it the image of a managed etcd"),
        ("PDCLUSTER_RESYNC_SECONDS", "0", "seconds from 1 to 86400"),
        ("PDCLUSTER_RESYNC_SECONDS", "nan", "seconds from 1 to 86400"),
        ("PDCLUSTER_WATCH_SILENCE_SECONDS", "4", "seconds from 5 to 600"),
        ("PDCLUSTER_CONCURRENCY", "2.5", "a whole number from 1 to 64"),
        ("PDCLUSTER_HTTP_PORT", "http", "a port from 0 (any) to 65535"),
        ("PDCLUSTER_LOG_LEVEL", "loud", "debug, info, warning or error"),
        ("PDCLUSTER_LOG_FORMAT", "xml", "text or json"),
        ("PDCLUSTER_LEASE_NAME", "Team A", "a name of lower-case letters"),
        ("PDCLUSTER_LEASE_NAME", "a" * 254, "a name of lower-case letters"),
        ("PDCLUSTER_CLUSTER_DOMAIN", ".local", "a DNS domain, as in cluster.local"),
        ("PDCLUSTER_LEADER_ELECTION", "yes", "true or false"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_what_it_must_be(
    name: str, value: str, wanted: str
):
    with pytest.raises(StartError) as refusal:
        Settings.from_environment({**NEEDED, name: value})
    assert refusal.value.exit_code == 2
    assert name in str(refusal.value)
    assert wanted in str(refusal.value)


def test_the_process_says_all_that_is_wrong_and_exits_with_2():
    environment = {"PDCLUSTER_CONCURRENCY": "none"}
    result = subprocess.run(
        [sys.executable, "-m", "pdcluster_operator"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    assert [line.split()[1] for line in lines] == [
        "PDCLUSTER_WORKER_IMAGE",
        "PDCLUSTER_ETCD_IMAGE",
        "PDCLUSTER_CONCURRENCY",
    ]
    assert all(line.startswith("error: ") for line in lines)


def test_the_process_says_when_it_finds_no_way_to_the_api_server(tmp_path: Path):
    environment = {**NEEDED, "KUBECONFIG": str(tmp_path / "missing")}
    result = subprocess.run(
        [sys.executable, "-m", "pdcluster_operator"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 2
    assert str(tmp_path / "missing") in result.stderr
    assert "Traceback" not in result.stderr
