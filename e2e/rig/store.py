"""The image store that a cluster's containerd starts from, filled before the cluster starts.

Importing gigabytes takes longer than anything else, so it is done once for
each image: the store lies in the cache directory, keeps the layers that it has
of an older image, and a cluster takes a copy whose unchanging files are hard
links.  The images' layers thus lie on the disk once unpacked and once
as blobs, whatever the number of clusters.
"""

import fcntl
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e.rig.images import buildah, buildah_command
from e2e.rig.paths import CACHE, IMAGES
from e2e.rig.shell import CommandError, run, step

STORE = CACHE.images / "containerd"
START_SECONDS = 30.0


def fill() -> None:
    """Bring every image that the store lacks, or holds an older one of, into it.

    Raises CommandError.
    """
    CACHE.images.mkdir(parents=True, exist_ok=True)
    with (CACHE.images / "store.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with _containerd() as address:
            _sweep(address)
            held = _held(address)
            for image in IMAGES.loaded:
                if held.get(image) != (wanted := _identity(image)):
                    with step(f"loading {image}"), _kept(address, image):
                        _load(address, image)
                    (STORE / "loaded").mkdir(exist_ok=True)
                    _record(image).write_text(wanted)


def copy_to(folder: Path) -> None:
    """Make a store for one cluster: hard links, but for the databases, which are
    written in place.
    """
    run(["cp", "-al", STORE, folder])
    for database in folder.rglob("*.db"):
        original = STORE / database.relative_to(folder)
        database.unlink()
        shutil.copy2(original, database)


def _held(address: Path) -> dict[str, str]:
    """Names of the images in the store -> id of the build that each came from."""
    names = _ctr(address, "images", "list", "--quiet").split()
    return {name: _record(name).read_text() for name in names if _record(name).is_file()}


def _sweep(address: Path) -> None:
    """Collect now what no image holds any more: later it could go while an image that was thought
    to have it is imported.
    """
    _ctr(address, "leases", "create", "--id", "sweep")
    _ctr(address, "leases", "delete", "--sync", "sweep")


@contextmanager
def _kept(address: Path, image: str) -> Iterator[None]:
    """Hold the layers of the older image of a name.

    Layers that the new one shares have no other holder until it is unpacked.
    """
    before = f"{image}-before"
    is_held = image in _ctr(address, "images", "list", "--quiet").split()
    if is_held:
        _ctr(address, "images", "tag", "--force", image, before)
    yield
    if is_held:
        _ctr(address, "images", "delete", before)


def _ctr(address: Path, *arguments: str) -> str:
    return run(["ctr", "--address", address, "--namespace", "k8s.io", *arguments])


def _record(image: str) -> Path:
    return STORE / "loaded" / image.rpartition("/")[2]


def _identity(image: str) -> str:
    return buildah("images", "--format", "{{.ID}}", "--no-trunc", image).strip()


def _load(address: Path, image: str) -> None:
    """Send the image to the store, layers uncompressed: to compress gigabytes takes minutes."""
    command, environment = buildah_command(
        "push", "--quiet", image, f"docker-archive:/dev/stdout:{image}"
    )
    importer = ["ctr", "--address", str(address), "--namespace", "k8s.io", "images", "import", "-"]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors
        ) as sending,
        subprocess.Popen(
            importer, stdin=sending.stdout, stdout=subprocess.DEVNULL, stderr=errors
        ) as importing,
    ):
        assert sending.stdout is not None
        sending.stdout.close()  # the importer's alone, so that its end ends the sender
        statuses = (importing.wait(), sending.wait())
        errors.seek(0)
        if any(statuses):
            raise CommandError(f"importing {image}: {errors.read()[-3000:]}")


@contextmanager
def _containerd() -> Iterator[Path]:
    """A containerd on the store, without containers; ended afterwards."""
    state = CACHE.images / "state"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir()
    address = state / "containerd.sock"
    config: dict[str, Any] = {
        "root": STORE,
        "state": state / "run",
        "address": address,
        "log": state / "log",
    }
    (state / "containerd.toml").write_text(
        'version = 2\nroot = "{root}"\nstate = "{state}"\n'
        'disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]\n'
        '[grpc]\n  address = "{address}"\n'.format(**config)
    )
    with (state / "log").open("wb") as log:
        process = subprocess.Popen(
            ["containerd", "--config", str(state / "containerd.toml")], stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not address.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise CommandError(
                    f"containerd did not start:\n{(state / 'log').read_text()[-2000:]}"
                )
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()
