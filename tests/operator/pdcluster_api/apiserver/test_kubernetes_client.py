"""The Kubernetes client without its synchronous half, in a process of its own."""

import subprocess
import sys

OPERATOR = """
import sys
import pdcluster_operator.main
assert not {"kubernetes.dynamic", "kubernetes.config", "kubernetes.informer"} & set(sys.modules)
"""

OTHERS = """
import pdcluster_api.apiserver.connection
from kubernetes import client
assert client.V1Pod(kind="Pod").kind == "Pod"
"""

BEFORE = """
import kubernetes
from pdcluster_api.apiserver.connection import Configuration
assert Configuration is kubernetes.aio.client.Configuration
"""


def _run(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_the_operator_imports_nothing_of_the_synchronous_half():
    _run(OPERATOR)


def test_another_may_still_import_it():
    _run(OTHERS)


def test_one_that_was_imported_before_is_used_as_it_is():
    _run(BEFORE)
