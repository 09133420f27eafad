"""The policy file, which may change while a worker runs.

An operator that is newer than a revision's image may render fields that are unknown here.
"""

import logging
from pathlib import Path

from pdcluster_schema.errors import InvalidObjectError
from pdcluster_schema.faults import validated_known
from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.config.documents import check_numbers, document_of
from pdcluster_worker.errors import ConfigError

logger = logging.getLogger(__name__)


def load_policy(path: Path) -> PolicyConfig:
    """Raises ConfigError; unknown fields are logged."""
    document = document_of(path)
    check_numbers(path, document)
    try:
        policy, unknown = validated_known(PolicyConfig, document)
    except InvalidObjectError as e:
        raise ConfigError(f"{path}: {'; '.join(map(str, e.faults))}") from e
    if unknown:
        logger.warning(
            "ignored unknown fields of the policy, applied the others path=%s fields=%s",
            path,
            ",".join(unknown),
        )
    return policy
