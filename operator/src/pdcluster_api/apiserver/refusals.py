"""Refusals of pods: the words in which Kubernetes' controllers say why they could not make one."""

import re

from pdcluster_api.plan.observed.problem import Problem
from pdcluster_schema import conditions

_POD = re.compile(r'pods "[^"]*" is ')
_PREFIX = re.compile(r"^.*? failed error: ", re.DOTALL)


def refusal_of(message: str) -> Problem:
    """Problem from a controller's message, without the name of the pod that happened to be
    tried.
    """
    short = _POD.sub("a pod is ", _PREFIX.sub("", message))
    reason = conditions.QUOTA_EXCEEDED if "exceeded quota" in message else conditions.PODS_REFUSED
    return Problem(reason, short)
