"""The life of a cluster's certificates: from the first Secret through rotations, edits by hand and
half-done writes.

Time is a value; the handshakes are real, between workers that have read the
files before a step and those that have read them after it.
"""

import base64
import datetime
import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cryptography import x509

from pdcluster_api.certificates.authority import (
    Pair,
    StoredSecret,
    issue,
    make_authority,
    read_secrets,
)
from pdcluster_api.certificates.rotation import (
    SETTLE,
    RotationDecision,
    RotationStep,
    Secrets,
    carry_out,
    next_step,
)
from pdcluster_schema.labels import CERTIFICATES_CHANGED, OBSERVED_ROTATION
from tests.operator.pdcluster_api.certificates.handshakes import talk

START = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
MINUTE = datetime.timedelta(minutes=1)
DAY = datetime.timedelta(days=1)
ROTATION = [RotationStep.START_ROTATION, RotationStep.SWITCH_LEAF, RotationStep.FINISH_ROTATION]


@dataclass
class Cluster:
    """The two Secrets and a clock; `step` does what an operator does at that moment."""

    ca: StoredSecret | None = None
    tls: StoredSecret | None = None
    requested: str | None = None
    now: datetime.datetime = START
    seen: list[StoredSecret] = field(default_factory=list)

    def decide(self) -> RotationDecision:
        return next_step(self.ca, self.tls, self.now, self.requested)

    def step(self) -> RotationDecision:
        """One decision, carried out; `seen` has every state of the workers' files."""
        decision = self.decide()
        secrets = carry_out(decision.step, self.ca, self.tls, self.now, self.requested)
        self.ca, self.tls = secrets.ca, secrets.tls
        self.seen.append(secrets.tls)
        return decision

    def steps(self) -> list[RotationStep]:
        """Look again whenever a decision says so, until nothing is left to do."""
        made = []
        while True:
            decision = self.step()
            if decision.step is RotationStep.KEEP and decision.requeue_after_seconds is None:
                return made
            if decision.step is not RotationStep.KEEP:
                made.append(decision.step)
            self.now += datetime.timedelta(seconds=decision.requeue_after_seconds or 0)

    @property
    def secrets(self) -> Secrets:
        assert self.ca is not None
        assert self.tls is not None
        return Secrets(self.ca, self.tls)


@pytest.fixture
def cluster() -> Cluster:
    """With its first certificates made."""
    made = Cluster()
    assert made.steps() == [RotationStep.CREATE]
    return made


def edited(stored: StoredSecret | None, **values: bytes) -> StoredSecret:
    assert stored is not None
    return replace(
        stored,
        data={**stored.data, **{key.replace("_", "."): value for key, value in values.items()}},
    )


def without(stored: StoredSecret | None, key: str) -> StoredSecret:
    assert stored is not None
    return replace(stored, data={name: value for name, value in stored.data.items() if name != key})


def accepted(stored: StoredSecret | None) -> int:
    assert stored is not None
    return len(x509.load_pem_x509_certificates(stored.data["ca.crt"]))


def check_pairs(seen: list[StoredSecret], folder: Path) -> None:
    """Within a settle time a worker may lag one state behind the others, and never more."""
    for before, after in itertools.pairwise(seen):
        talk(before, after, folder)


def test_the_first_look_makes_both_secrets(tmp_path: Path) -> None:
    cluster = Cluster(requested="at birth")
    assert cluster.step().step is RotationStep.CREATE
    assert set(cluster.secrets.ca.data) == {"tls.crt", "tls.key"}
    assert set(cluster.secrets.tls.data) == {"ca.crt", "tls.crt", "tls.key"}
    assert cluster.secrets.ca.data["tls.crt"] == cluster.secrets.tls.data["ca.crt"]
    talk(cluster.secrets.tls, cluster.secrets.tls, tmp_path)
    # what was asked before there was anything asks for nothing
    assert cluster.decide() == RotationDecision(RotationStep.KEEP)


def test_a_rotation_never_lets_two_workers_refuse_each_other(
    cluster: Cluster, tmp_path: Path
) -> None:
    old, cluster.requested = cluster.secrets, "2026-11"
    assert cluster.steps() == ROTATION
    check_pairs(cluster.seen, tmp_path)
    new = cluster.secrets
    assert new.ca.data["tls.crt"] not in old.tls.data["ca.crt"]
    assert new.tls.data["ca.crt"] == new.ca.data["tls.crt"]
    assert cluster.now == START + 2 * SETTLE
    # ssl.SSLError: the old authority is out
    with pytest.raises(OSError, match="certificate verify failed"):
        talk(old.tls, new.tls, tmp_path)


def test_a_rotation_waits_for_workers_to_read(cluster: Cluster) -> None:
    cluster.requested = "1"
    assert cluster.step() == RotationDecision(
        RotationStep.START_ROTATION,
        "moving to a new certificate authority, as asked",
        requeue_after_seconds=SETTLE.total_seconds(),
    )
    cluster.now += SETTLE - MINUTE
    assert cluster.decide() == RotationDecision(RotationStep.KEEP, requeue_after_seconds=60.0)
    cluster.now += MINUTE
    assert cluster.step().step is RotationStep.SWITCH_LEAF
    assert cluster.decide() == RotationDecision(
        RotationStep.KEEP, requeue_after_seconds=SETTLE.total_seconds()
    )


@pytest.mark.parametrize("requested", ["1", None])
def test_a_request_counts_once(requested: str | None, cluster: Cluster) -> None:
    cluster.requested = "1"
    assert cluster.steps() == ROTATION
    cluster.requested = requested
    assert cluster.steps() == []
    cluster.requested = "2"
    assert cluster.steps() == ROTATION


def test_a_request_during_a_rotation_waits_for_its_end(cluster: Cluster, tmp_path: Path) -> None:
    cluster.requested = "1"
    cluster.step()
    cluster.requested = "2"
    assert cluster.steps() == [*ROTATION[1:], *ROTATION]
    check_pairs(cluster.seen, tmp_path)


@pytest.mark.parametrize("half", ["ca", "tls"])
def test_a_start_of_which_one_write_failed_is_gone_on_with(
    half: str, cluster: Cluster, tmp_path: Path
) -> None:
    before, cluster.requested = cluster.secrets, "1"
    cluster.step()
    if half == "ca":
        cluster.tls = before.tls
    else:
        cluster.ca = before.ca
    assert cluster.steps()[-1] is RotationStep.FINISH_ROTATION
    check_pairs(cluster.seen, tmp_path)
    assert accepted(cluster.tls) == 1
    assert cluster.secrets.ca.data != before.ca.data


def test_the_leaf_is_renewed_before_it_ends_and_the_authority_stays(cluster: Cluster) -> None:
    before = cluster.secrets
    cluster.now += 240 * DAY
    assert cluster.steps() == []
    cluster.now += 10 * DAY
    assert cluster.steps() == [RotationStep.RENEW_LEAF]
    assert cluster.secrets.ca == before.ca
    assert cluster.secrets.tls.data["ca.crt"] == before.tls.data["ca.crt"]
    assert cluster.secrets.tls.data["tls.crt"] != before.tls.data["tls.crt"]


def test_an_authority_that_nears_its_end_is_rotated(cluster: Cluster) -> None:
    cluster.now += 7 * 365 * DAY
    assert cluster.steps() == [
        RotationStep.RENEW_LEAF
    ]  # the operator slept for years: the leaf had ended
    cluster.now += 2 * 365 * DAY
    assert cluster.steps() == [RotationStep.RENEW_LEAF, *ROTATION]


def test_a_leaf_that_ended_is_replaced_at_once(cluster: Cluster) -> None:
    cluster.now += 400 * DAY
    decision = cluster.decide()
    assert decision.step is RotationStep.RENEW_LEAF
    assert "valid only from" in decision.reason


@pytest.mark.parametrize(
    "stamp",
    [None, "soon", "2026-11-21T00:00:00", (START + 9 * DAY).isoformat()],
    ids=["none", "no time", "no zone", "far ahead"],
)
def test_an_unusable_time_of_change_settles_again(
    stamp: str | None, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.requested = "1"
    cluster.step()
    cluster.tls = replace(
        cluster.secrets.tls, annotations={CERTIFICATES_CHANGED: stamp} if stamp else {}
    )
    assert cluster.steps() == [RotationStep.ACCEPT_BOTH, *ROTATION[1:]]
    check_pairs(cluster.seen, tmp_path)


STRANGER = make_authority(START)
OTHER = make_authority(START)

BROKEN_PAIRS = {
    "no certificate": ({"tls_crt": b""}, "tls.crt is not a PEM certificate"),
    "text": ({"tls_crt": b"hello"}, "tls.crt is not a PEM certificate"),
    "no key": ({"tls_key": b""}, "tls.key is not an unencrypted PEM key"),
    "another's key": ({"tls_key": OTHER.key}, "tls.key does not belong to tls.crt"),
}


@pytest.mark.parametrize("case", BROKEN_PAIRS)
def test_a_broken_authority_is_replaced_without_a_break(
    case: str, cluster: Cluster, tmp_path: Path
) -> None:
    values, fault = BROKEN_PAIRS[case]
    cluster.ca = edited(cluster.ca, **values)
    assert fault in cluster.decide().reason
    assert cluster.steps() == ROTATION
    check_pairs(cluster.seen, tmp_path)


def test_a_deleted_authority_is_replaced_without_a_break(cluster: Cluster, tmp_path: Path) -> None:
    cluster.ca = None
    assert "it does not exist" in cluster.decide().reason
    assert cluster.steps() == ROTATION
    check_pairs(cluster.seen, tmp_path)


def test_a_leaf_in_the_authoritys_place_is_none(cluster: Cluster) -> None:
    cluster.ca = edited(
        cluster.ca,
        tls_crt=cluster.secrets.tls.data["tls.crt"],
        tls_key=cluster.secrets.tls.data["tls.key"],
    )
    assert "not the certificate of an authority" in cluster.decide().reason


@pytest.mark.parametrize("case", BROKEN_PAIRS)
def test_a_broken_leaf_is_made_again_by_the_same_authority(
    case: str, cluster: Cluster, tmp_path: Path
) -> None:
    values, fault = BROKEN_PAIRS[case]
    cluster.tls = edited(cluster.tls, **values)
    assert fault in cluster.decide().reason
    assert cluster.steps() == [RotationStep.RENEW_LEAF]
    talk(cluster.seen[0], cluster.secrets.tls, tmp_path)


def test_a_deleted_workers_secret_is_made_again(cluster: Cluster, tmp_path: Path) -> None:
    cluster.tls = None
    assert cluster.steps() == [RotationStep.RENEW_LEAF]
    talk(cluster.seen[0], cluster.secrets.tls, tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"hello", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_a_broken_list_of_authorities_is_put_right(
    content: bytes, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.tls = edited(cluster.tls, ca_crt=content)
    assert cluster.steps() == [RotationStep.ACCEPT_BOTH]
    talk(cluster.seen[0], cluster.secrets.tls, tmp_path)


def test_a_stranger_in_the_list_of_authorities_is_put_out(cluster: Cluster) -> None:
    before = cluster.secrets.tls
    cluster.tls = edited(before, ca_crt=before.data["ca.crt"] + STRANGER.certificate)
    assert cluster.steps() == [RotationStep.FINISH_ROTATION]
    assert cluster.secrets.tls.data == before.data


def worker_of(authority: Pair, names: list[str]) -> dict[str, bytes]:
    leaf = issue(authority, names, START)
    return {"tls_crt": leaf.certificate, "tls_key": leaf.key}


def test_a_leaf_of_a_stranger_is_replaced(cluster: Cluster) -> None:
    cluster.tls = edited(cluster.tls, **worker_of(STRANGER, ["worker.pdcluster"]))
    assert "of no authority in ca.crt" in cluster.decide().reason
    assert cluster.steps() == [RotationStep.RENEW_LEAF]


def test_a_leaf_for_another_name_is_replaced(cluster: Cluster) -> None:
    ca = cluster.secrets.ca.data
    cluster.tls = edited(
        cluster.tls, **worker_of(Pair(ca["tls.crt"], ca["tls.key"]), ["other.pdcluster"])
    )
    assert "not for worker.pdcluster" in cluster.decide().reason
    assert cluster.steps() == [RotationStep.RENEW_LEAF]


def test_with_nothing_left_all_is_made_again_and_reported(cluster: Cluster, tmp_path: Path) -> None:
    cluster.ca, cluster.tls = without(cluster.ca, "tls.key"), without(cluster.tls, "tls.key")
    decision = cluster.decide()
    assert decision.step is RotationStep.CREATE
    assert "may refuse each other" in decision.reason
    assert cluster.steps() == [RotationStep.CREATE]
    talk(cluster.secrets.tls, cluster.secrets.tls, tmp_path)


def test_what_a_repair_replaced_answers_the_request_too(cluster: Cluster) -> None:
    cluster.ca, cluster.requested = None, "1"
    assert cluster.steps() == ROTATION
    assert cluster.secrets.ca.annotations == {OBSERVED_ROTATION: "1"}


def test_a_renewal_by_age_remembers_the_last_request(cluster: Cluster) -> None:
    cluster.requested = "1"
    cluster.steps()
    cluster.requested, cluster.now = None, cluster.now + 9 * 365 * DAY
    assert cluster.steps() == [RotationStep.RENEW_LEAF, *ROTATION]
    cluster.requested = "1"
    assert cluster.steps() == []


def test_a_secret_is_read_as_the_api_server_sends_it() -> None:
    body = {
        "metadata": {"annotations": {"a": "b"}},
        "data": {"tls.crt": base64.b64encode(b"x").decode(), "tls.key": "not base64!"},
    }
    assert StoredSecret.of(body) == StoredSecret({"tls.crt": b"x", "tls.key": b""}, {"a": "b"})
    assert StoredSecret.of({"metadata": {}}) == StoredSecret({})
    assert StoredSecret.of(None) is None


def test_reading_nothing_says_so() -> None:
    held = read_secrets(None, None, START)
    assert (held.authority, held.accepted, held.leaf) == (None, (), None)
    assert held.authority_fault == held.leaf_fault == "it does not exist"
