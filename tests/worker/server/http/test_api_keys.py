"""API keys from a folder as Kubernetes mounts a Secret: read at the start, followed while it
changes.
"""

import asyncio
import logging
import time
from pathlib import Path

import pytest

from pdcluster_worker.errors import ConfigError
from pdcluster_worker.server.http import api_keys
from pdcluster_worker.server.http.api_keys import ApiKeys

DEADLINE_SECONDS = 20.0


class Mount:
    """A mounted Secret: visible links through `..data` to a folder that is swapped at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        folder.mkdir()

    def write(self, **keys: str) -> None:
        """Make these the only keys."""
        self._count += 1
        version = self.folder / f"..version-{self._count}"
        version.mkdir()
        for name, key in keys.items():
            (version / name).write_text(key)
        fresh = self.folder / "..data_tmp"
        fresh.symlink_to(version.name)
        fresh.replace(self.folder / "..data")
        for path in self.folder.iterdir():
            if not path.name.startswith(".") and path.name not in keys:
                path.unlink()
        for name in keys:
            if not (self.folder / name).is_symlink():
                (self.folder / name).symlink_to(f"..data/{name}")


@pytest.fixture
def mount(tmp_path: Path) -> Mount:
    made = Mount(tmp_path / "api-keys")
    made.write(alice="sk-alice\n", bob="sk-bob")
    return made


def test_without_a_folder_no_key_is_required() -> None:
    keys = ApiKeys(None)
    assert not keys.required
    assert keys.reload() is False


def test_every_file_is_one_key(mount: Mount) -> None:
    keys = ApiKeys(mount.folder)
    assert keys.required
    names = ("sk-alice", "sk-bob", "sk-alic", "sk-alice\n", "", "ключ")
    assert [keys.tenant_of(key) for key in names] == ["alice", "bob", *[None] * 4]


def test_keys_come_and_go(mount: Mount) -> None:
    keys = ApiKeys(mount.folder)
    assert keys.reload() is False
    mount.write(bob="sk-bob", carol="sk-carol")
    assert keys.reload() is True
    known = [keys.tenant_of(key) for key in ("sk-alice", "sk-bob", "sk-carol")]
    assert known == [None, "bob", "carol"]


async def test_the_folder_is_followed(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "CHECK_SECONDS", 0.01)
    keys = ApiKeys(mount.folder)
    following = asyncio.create_task(keys.watch())
    mount.write(carol="sk-carol")
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not keys.tenant_of("sk-carol"):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    following.cancel()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({}, "holds no key: put one file per key there"),
        ({"alice": " \n"}, "alice is empty"),
        ({"alice": "two words"}, "alice holds more than one word of printable ASCII"),
        ({"alice": "schlüssel"}, "alice holds more than one word of printable ASCII"),
    ],
)
def test_with_no_good_key_it_does_not_start_and_later_refuses_everything(
    keys: dict[str, str],
    reason: str,
    mount: Mount,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = Mount(tmp_path / "bad")
    bad.write(**keys)
    with pytest.raises(ConfigError, match=f"listen.apiKeys: .*{reason}"):
        ApiKeys(bad.folder)

    good = ApiKeys(mount.folder)
    mount.write(**keys)
    with caplog.at_level(logging.ERROR):
        assert (good.reload(), good.reload()) == (True, False)
    assert good.required
    assert not any(
        good.tenant_of(key) for key in ("sk-alice", "sk-bob", "", " ", "two words", "schlüssel")
    )
    assert caplog.text.count("no API key is left, every request is refused with 401") == 1
    assert reason in caplog.text
    mount.write(carol="sk-carol")
    assert good.reload() is True
    assert good.tenant_of("sk-carol")


def test_a_key_that_was_removed_is_refused_though_another_cannot_be_used(
    mount: Mount, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(mount.folder)
    mount.write(bob="sk-bob", carol="two words")
    with caplog.at_level(logging.ERROR):
        assert keys.reload() is True
    known = [keys.tenant_of(key) for key in ("sk-alice", "sk-bob", "two words")]
    assert known == [None, "bob", None]
    assert "carol holds more than one word" in caplog.text


def test_while_the_folder_cannot_be_read_the_last_keys_stay(
    mount: Mount, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(mount.folder)
    mount.folder.rename(tmp_path / "away")
    with caplog.at_level(logging.ERROR):
        assert (keys.reload(), keys.reload()) == (False, False)
    assert (keys.tenant_of("sk-alice"), caplog.text.count("keeping the last ones")) == ("alice", 1)
    (tmp_path / "away").rename(mount.folder)
    mount.write()
    assert keys.reload() is True
    assert not keys.tenant_of("sk-alice")


def test_a_folder_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"listen\.apiKeys: .*/none cannot be read: No such file or directory"
    ):
        ApiKeys(tmp_path / "none")


def test_keys_are_never_logged(mount: Mount, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        keys = ApiKeys(mount.folder)
        mount.write(alice="sk-secret", bob="sk-sec ret")
        keys.reload()
        mount.write(alice="sk-secret")
        keys.reload()
    assert "keys=1" in caplog.text
    assert "sk-" not in caplog.text
