"""The image store that a cluster's containerd starts from, filled before the cluster starts.

Importing gigabytes takes longer than anything else, so it is done once for
each image: the store lies in the cache directory, a new image sends only the
layers that the store lacks, and a cluster takes a copy whose unchanging files
are hard links.  The images' layers thus lie on the disk once unpacked and once
as blobs, whatever the number of clusters.
"""

import fcntl
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e.rig.images import buildah
from e2e.rig.paths import CACHE, IMAGES
from e2e.rig.shell import CommandError, run, step

STORE = CACHE.images / "containerd"
LAYOUT = CACHE.images / "layout"
BLOBS = STORE / "io.containerd.content.v1.content/blobs/sha256"
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
        shutil.rmtree(LAYOUT, ignore_errors=True)


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
    """Write the image as OCI layout, uncompressed, and import what the store lacks of it."""
    shutil.rmtree(LAYOUT, ignore_errors=True)
    (LAYOUT / "blobs/sha256").mkdir(parents=True)
    if BLOBS.is_dir():
        for blob in BLOBS.iterdir():  # present in the layout: buildah does not write them again
            os.link(blob, LAYOUT / "blobs/sha256" / blob.name)
    present = set((LAYOUT / "blobs/sha256").iterdir())
    buildah("push", "--disable-compression", "--quiet", image, f"oci:{LAYOUT}:{image}")
    index = json.loads((LAYOUT / "index.json").read_text())
    for manifest in index["manifests"]:
        manifest["annotations"] = {
            "io.containerd.image.name": image,
            "org.opencontainers.image.ref.name": image,
        }
    (LAYOUT / "index.json").write_text(json.dumps(index))
    command = ["ctr", "--address", str(address), "--namespace", "k8s.io", "images", "import", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as importing:
        assert importing.stdin is not None
        assert importing.stderr is not None
        with (
            importing.stdin,
            tarfile.open(mode="w|", fileobj=importing.stdin, bufsize=1 << 20) as archive,
        ):
            for name in ("oci-layout", "index.json"):
                archive.add(LAYOUT / name, name)
            for path in sorted(set((LAYOUT / "blobs/sha256").iterdir()) - present):
                archive.add(path, f"blobs/sha256/{path.name}")
        message = importing.stderr.read().decode()
    if importing.returncode:
        raise CommandError(f"importing {image}: {message}")


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
