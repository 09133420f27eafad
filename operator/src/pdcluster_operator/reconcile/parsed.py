"""PDClusters as they were last parsed, of those that were reconciled lately.

A PDCluster is reconciled some times in a row while it changes, and then rests for long.  Each
parsed one takes some 15 kB, and to parse it again some milliseconds.
"""

import logging
from collections import OrderedDict
from dataclasses import dataclass, field

from pdcluster_api.apiserver.observe import Live
from pdcluster_schema.load import parse_stored
from pdcluster_schema.pdcluster import PDCluster

logger = logging.getLogger(__name__)
MAX_PARSED = 128

SpecVersion = tuple[str, int]
"""Uid and generation."""


@dataclass
class ParsedClusters:
    """The last `MAX_PARSED` PDClusters that were asked for."""

    _parsed: "OrderedDict[SpecVersion, PDCluster]" = field(default_factory=OrderedDict)

    def of(self, live: Live) -> PDCluster:
        """The object, parsed.  Raises InvalidObjectError."""
        version = live.uid, live.body["metadata"].get("generation", 0)
        cluster = self._parsed.pop(version, None) or _parse(live)
        self._parsed[version] = cluster
        if len(self._parsed) > MAX_PARSED:
            self._parsed.popitem(last=False)
        return cluster


def _parse(live: Live) -> PDCluster:
    cluster, unknown = parse_stored(live.body)
    if unknown:
        logger.warning(
            "ignored fields of another version key=%s fields=%s", live.key, ",".join(unknown)
        )
    return cluster
