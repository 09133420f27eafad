"""The asynchronous half of the Kubernetes client, without the synchronous one, which `kubernetes`
imports too: some 7 MiB in each operator.
"""

import importlib.util
import sys

if "kubernetes" not in sys.modules:
    _found = importlib.util.find_spec("kubernetes")
    assert _found is not None, "the package kubernetes is not installed"
    sys.modules["kubernetes"] = importlib.util.module_from_spec(_found)

from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import (
    list_kube_config_contexts,
    load_incluster_config,
    load_kube_config,
)
from kubernetes.aio.config.config_exception import ConfigException

__all__ = [
    "ConfigException",
    "Configuration",
    "RESTClientObject",
    "list_kube_config_contexts",
    "load_incluster_config",
    "load_kube_config",
]
