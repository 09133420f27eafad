"""The policy file's watch, and the conditions beside it: they outlive whatever an edit does."""

import asyncio
from pathlib import Path

import pytest

from pdcluster_schema.policy import PolicyConfig
from pdcluster_worker.config import policy
from pdcluster_worker.config.policy import ConditionsFile, PolicyFile


def test_policy_that_is_newer_is_warned_of_once_for_each_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("newer: 1")
    policy = PolicyFile(path)
    for _ in range(3):
        assert not policy.reload()
    assert caplog.text.count("fields=newer") == 1

    path.write_text("{newer: 1, offload: {prefillQueueMax: 2}}")
    assert policy.reload()
    assert not policy.reload()
    assert (policy.current.offload.prefill_queue_max, caplog.text.count("fields=newer")) == (2, 2)


async def test_policy_watch_goes_on_after_a_change_that_could_not_be_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(policy, "CHECK_SECONDS", 0.01)
    path = tmp_path / "policy.yaml"
    path.write_text("")
    taken: asyncio.Queue[int] = asyncio.Queue()

    def take(policy: PolicyConfig) -> None:
        taken.put_nowait(policy.offload.prefill_queue_max)
        if policy.offload.prefill_queue_max == 1:
            raise OverflowError("too much")

    watching = asyncio.create_task(PolicyFile(path).watch(take))
    try:
        async with asyncio.timeout(10):
            for value in (1, 2):
                new = path.with_name("new")
                new.write_text(f"offload: {{prefillQueueMax: {value}}}")
                new.replace(path)
                assert await taken.get() == value
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    assert "a policy change was applied only in part" in caplog.text
    assert "OverflowError: too much" in caplog.text


def test_policy_with_a_number_that_python_does_not_write_out_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("stallSeconds: 30")
    policy = PolicyFile(path)
    path.write_text(f"stallSeconds: 0x{'f' * 5000}")
    assert not policy.reload()
    assert policy.current.stall_seconds == 30
    assert "stallSeconds: must be at most 3600, not a number of thousands" in caplog.text


def test_conditions_that_cannot_be_read_are_none_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, path = ConditionsFile(tmp_path / "policy.yaml"), tmp_path / "conditions.json"
    deep = b'{"newer": ' + b"[" * 100_000
    half = (b"", b"{", b'{"written": "now"}', b'{"written": 1, "items": []}')
    for broken in (*half, b'{"written": "\xff", "items": []}', deep):
        path.write_bytes(broken)
        caplog.clear()
        assert [file.current(), file.current()] == [None, None]
        assert caplog.text.count(f"passed over the conditions path={path}") == 1

    path.write_text('{"written": "now", "items": [], "newer": 1}')
    assert file.current() is not None
    path.unlink()
    assert file.current() is None
