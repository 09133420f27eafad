"""A store in a real Valkey server: entries are whole or absent, whatever becomes of the server."""

import random

import pytest

from pdcluster_worker.errors import ModelError
from pdcluster_worker.kv_tiers import redis_store
from pdcluster_worker.kv_tiers.redis_store import RedisStore
from pdcluster_worker.kv_tiers.shared import MOST_KNOWN, SharedTier, fingerprint_of
from tests.valkey_server import ValkeyServer

BLOCK_BYTES = 3000


def key_of(number):
    return random.Random(f"key {number}").randbytes(32)


def block_of(key):
    return memoryview(random.Random(key).randbytes(BLOCK_BYTES))


def open_tier(url, model=b"model", password_file=None):
    fingerprint = fingerprint_of(model)
    store = RedisStore("shared", url, password_file, fingerprint)
    return SharedTier("shared", store, fingerprint, BLOCK_BYTES, MOST_KNOWN)


def read(tier, key):
    target = memoryview(bytearray(BLOCK_BYTES))
    return tier.read(0, key, target) and target == block_of(key)


def fill(tier):
    for number in range(2000):
        tier.write(0, key_of(number), block_of(key_of(number)))


@pytest.fixture
def servers(tmp_path):
    started = []

    def start(*options, password=""):
        started.append(ValkeyServer(tmp_path, *options, password=password))
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def server(servers):
    return servers()


def test_what_one_worker_writes_another_finds(server):
    first, second, other = (
        open_tier(server.url),
        open_tier(server.url),
        open_tier(server.url, b"x"),
    )
    keys = [key_of(number) for number in range(1200)]
    for key in keys[:-1]:
        first.write(0, key, block_of(key))
    assert second.has(keys) == 1199
    assert second.has(keys[-1:]) == other.has(keys) == 0
    assert read(second, keys[700])
    with pytest.raises(LookupError):
        second.read(0, keys[-1], memoryview(bytearray(BLOCK_BYTES)))
    assert first.facts.store == second.facts.store != other.facts.store


@pytest.mark.parametrize("change", [-1, 0, 12, 60, 90, 100, 2000])
def test_an_entry_that_is_not_whole_is_a_miss_and_deleted(server, change):
    tier, key = open_tier(server.url), key_of(1)
    tier.write(0, key, block_of(key))
    (name,) = server.client.keys("*")
    value = bytearray(server.client.get(name))
    if change < 0:
        del value[-1]
    else:
        value[change] ^= 1
    server.client.set(name, bytes(value))
    assert not read(tier, key)
    assert tier.has([key]) == 0


def test_a_password_is_read_from_its_file(servers, tmp_path):
    server, file, key = servers(password="secret"), tmp_path / "password", key_of(1)
    file.write_text("secret\n")
    tier = open_tier(server.url, password_file=file)
    tier.write(0, key, block_of(key))
    assert read(tier, key)
    with pytest.raises(OSError, match="asks for another password: see passwordSecret"):
        open_tier(server.url).has([key])
    file.write_text("wrong")
    with pytest.raises(OSError, match="asks for another password: see passwordSecret"):
        open_tier(server.url, password_file=file).has([key])
    with pytest.raises(ModelError, match=r"cannot read the password .* passwordSecret"):
        open_tier(server.url, password_file=tmp_path / "none")


def test_a_server_that_is_full_and_evicts_nothing_is_an_error(servers, caplog):
    server = servers("--maxmemory", "2mb", "--maxmemory-policy", "noeviction")
    tier = open_tier(server.url)
    assert "set maxmemory, and allkeys-lru" in caplog.text
    with pytest.raises(OSError, match="maxmemory"):
        fill(tier)
    assert read(tier, key_of(0))


def test_a_server_that_evicts_keeps_its_limit(servers, caplog):
    server = servers("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    tier = open_tier(server.url)
    assert "set maxmemory" not in caplog.text
    fill(tier)
    assert read(tier, key_of(1999))
    assert tier.has([key_of(0)]) == 0


def test_a_server_that_is_gone_is_an_error_until_it_is_back(server):
    tier, key = open_tier(server.url), key_of(1)
    tier.write(0, key, block_of(key))
    server.stop()
    for call in (lambda: tier.has([key]), lambda: read(tier, key)):
        with pytest.raises(OSError, match=r"."):
            call()
    with pytest.raises(OSError, match=r"."):
        tier.write(0, key, block_of(key))
    late = open_tier(server.url)  # a worker starts without its store
    server.start()
    for each in (tier, late):
        each.write(0, key, block_of(key))
        assert read(each, key)


def test_a_server_that_hangs_is_an_error_in_time(server, monkeypatch):
    monkeypatch.setattr(redis_store, "CALL_SECONDS", 0.1)
    tier, key = open_tier(server.url), key_of(1)
    tier.write(0, key, block_of(key))
    server.hang()
    with pytest.raises(OSError, match=r"(?i)timeout"):
        tier.has([key])
    server.go_on()
    assert read(tier, key)
