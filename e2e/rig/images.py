"""Builds the images of the test cluster with buildah, from the Dockerfiles that everyone uses.

No registry is asked: the base that the Dockerfiles take as BASE_IMAGE is a
Debian with Python made by debootstrap, and busybox (the pause image, too) and
etcd are single static binaries.  vLLM's is a stand-in for the published one, of
the packages that the benchmarks install.  buildah keeps its layers in the cache
directory, so a change of our code rebuilds the last layers only.

Debian's buildah (1.28) empties the file system of an image after `RUN
--mount=type=cache`, so such options are taken out.  Nothing else of the
Dockerfiles changes.  Without a cache uv links what it unpacks into the
environment, which a cache elsewhere would hold a second time, in gigabytes.
"""

import hashlib
import os
import re
import shutil
from pathlib import Path

from e2e.rig.own_root import with_own_root
from e2e.rig.paths import CACHE, DIST, DIST_SWITCH, HAS_STOCK_ENGINE, IMAGES, REPOSITORY
from e2e.rig.shell import CommandError, run, step

BASE_PACKAGES = "ca-certificates,python3,python3-venv"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# How this machine reaches a package registry, where it says so: settings of the stand-in, which
# every stage inherits.
REGISTRY_SETTINGS = (
    "PIP_INDEX_URL",
    "PIP_CERT",
    "UV_DEFAULT_INDEX",
    "SSL_CERT_FILE",
    "HTTP_PROXY",
    "HTTPS_PROXY",
)
NO_CACHE = "ENV UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1"

# torch's build for CPUs is in an index of its own, which this machine need not reach.
DOCKERFILES: tuple[tuple[str, str, dict[str, str]], ...] = (
    (IMAGES.operator, "Dockerfile.operator", {}),
    (IMAGES.server, "Dockerfile.worker", {"VARIANT": "server"})
    if HAS_STOCK_ENGINE
    else (IMAGES.worker, "Dockerfile.worker", {"VARIANT": "cpu-pypi"}),
)

# Free disk that the building and loading of an image takes for a while, in GB.  After the worker's
# 6.4 were measured (2.3 of buildah, 4.1 of containerd, all images), and a copy of its largest layer
# comes meanwhile; vLLM's is estimated by its size.
ROOM_GB = {IMAGES.worker: 12, IMAGES.vllm: 30}

VLLM_INSTALLER = REPOSITORY / "bench/peers/install_vllm.sh"
VLLM_DOCKERFILE = Path(__file__).with_name("vllm.Dockerfile")

MOUNT = re.compile(r"--mount=type=(?:cache|secret),\S+\s+(\\\n\s*)?")

PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap", "busybox": "busybox-static"}


def build_images() -> None:
    """Make every image that is missing or whose sources have changed."""
    _forget_old_layers()
    _build_base()
    busybox = shutil.which("busybox") or "/bin/busybox"
    _build_binary(
        IMAGES.busybox,
        Path(busybox),
        'RUN ["/bin/busybox", "--install", "/bin"]\nCMD ["/bin/sleep", "2147483647"]',
    )
    _build_binary(IMAGES.etcd, CACHE.kubernetes / "etcd", 'ENTRYPOINT ["/bin/etcd"]')
    for image, dockerfile, arguments in DOCKERFILES:
        ask_for_room(image)
        if DIST:
            _take_released(image)
            continue
        with step(f"building {image}"):
            _build(image, REPOSITORY / dockerfile, REPOSITORY, BASE_IMAGE=IMAGES.base, **arguments)
    if HAS_STOCK_ENGINE:
        _build_vllm()
    shutil.rmtree(CACHE.images / "tmp")
    (CACHE.images / "dependencies").write_text(_dependencies())


def buildah(*arguments: object) -> str:
    """Run buildah to its end and return its stdout.  Raises CommandError."""
    command, environment = buildah_command(*arguments)
    return run(command, environment=environment)


def buildah_command(*arguments: object) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of buildah on the storage in the cache directory."""
    (CACHE.images / "tmp").mkdir(parents=True, exist_ok=True)
    storage = [
        "--root",
        CACHE.images / "storage",
        "--runroot",
        CACHE.images / "run",
        "--storage-driver",
        "overlay",
    ]
    command = with_own_root(["buildah", *storage, *arguments])
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(CACHE.images / "tmp")}
    return [str(word) for word in command], environment


def has_image(name: str) -> bool:
    return name in buildah("images", "--format", "{{.Name}}:{{.Tag}}").split()


def ask_for_room(image: str) -> None:
    """Raise CommandError where the disk cannot take an image that is not there, before minutes of
    building it.
    """
    wanted, free = ROOM_GB.get(image, 0), shutil.disk_usage(CACHE.images).free / 1e9
    if free < wanted and not has_image(image):
        raise CommandError(
            f"{CACHE.images} has {free:.0f} GB free, and {image} takes {wanted} GB for a while: "
            "free some, or name a folder on a larger disk in PDCLUSTER_CACHE"
        )


def released(pattern: str) -> Path:
    """The file of the release that is tested.  Raises CommandError where there is none, or more."""
    assert DIST is not None
    found = sorted(DIST.glob(pattern))
    if len(found) != 1:
        raise CommandError(
            f"{DIST_SWITCH} is {DIST}, which has {len(found)} files {pattern}, not one: build "
            "it again by `make release release-images`"
        )
    return found[0]


def _take_released(image: str) -> None:
    """Take an image from the release's archive, under the name that the tests use."""
    archive = released(f"{image.rpartition('/')[2].partition(':')[0]}-*.oci.tar")
    with step(f"taking {image} from {archive.name}"):
        buildah("tag", buildah("pull", "--quiet", f"oci-archive:{archive}").split()[-1], image)


def _dependencies() -> str:
    """A digest of what decides the worker's large layers; layers of other dependencies are never
    used again.
    """
    sources = [
        REPOSITORY / name
        for name in (
            "Dockerfile.worker",
            "constraints.txt",
            "scripts/cuda_packages.txt",
            "scripts/torch_without_cuda.py",
            "schema/pyproject.toml",
            "worker/pyproject.toml",
        )
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()


def _forget_old_layers() -> None:
    record = CACHE.images / "dependencies"
    if record.exists() and record.read_text() == _dependencies():
        return
    debian = (
        buildah("images", "--quiet", "--no-trunc", IMAGES.debian).split()
        if has_image(IMAGES.debian)
        else []
    )
    old = [
        image
        for image in buildah("images", "--all", "--quiet", "--no-trunc").split()
        if image not in debian
    ]
    if old:
        buildah("rmi", "--force", *dict.fromkeys(old))


def _build(image: str, dockerfile: Path, context: Path, **arguments: str) -> None:
    """Build with these arguments of the Dockerfile."""
    given = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    without_mounts = CACHE.images / "tmp/Dockerfile"
    without_mounts.parent.mkdir(parents=True, exist_ok=True)
    without_mounts.write_text(MOUNT.sub("", dockerfile.read_text()))
    options = (
        "--layers",
        "--pull-never",
        "--network=host",
        "--format=docker",
    )
    buildah("build", *options, *given, "-f", without_mounts, "-t", image, context)


def _build_vllm() -> None:
    """The stock engine's; not looked at again, for a minute, while its packages are the same."""
    with step(f"installing vLLM into {CACHE.vllm}"):
        run([VLLM_INSTALLER, CACHE.vllm])
    record = CACHE.images / "vllm"
    sources = VLLM_DOCKERFILE.read_text() + (CACHE.vllm / ".ready").read_text()
    if has_image(IMAGES.vllm) and record.is_file() and record.read_text() == sources:
        return
    ask_for_room(IMAGES.vllm)
    with step(f"building {IMAGES.vllm}"):
        _build(IMAGES.vllm, VLLM_DOCKERFILE, CACHE.vllm, BASE_IMAGE=IMAGES.base)
    record.write_text(sources)


def _build_base() -> None:
    if not has_image(IMAGES.debian):
        _build_debian()
    context = CACHE.images / "base"
    context.mkdir(exist_ok=True)
    settings = [
        f'ENV {name}="{os.environ[name]}"\n' for name in REGISTRY_SETTINGS if os.environ.get(name)
    ]
    shutil.copy(CERTIFICATES, context / "certificates")
    (context / "Dockerfile").write_text(
        f"FROM {IMAGES.debian}\nCOPY certificates {CERTIFICATES}\n{NO_CACHE}\n" + "".join(settings)
    )
    _build(IMAGES.base, context / "Dockerfile", context)
    shutil.rmtree(context)


def _build_debian() -> None:
    context = CACHE.images / "debian"
    shutil.rmtree(context, ignore_errors=True)
    root = context / "root"
    with step("making a Debian with Python as base image"):
        run(["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", root])
        (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
        leave_out = (
            "./dev/*",
            "./var/cache/apt/*",
            "./var/lib/apt/lists/*",
            "./usr/share/doc/*",
            "./usr/share/man/*",
        )
        run(
            [
                "tar",
                "-C",
                root,
                *(f"--exclude={pattern}" for pattern in leave_out),
                "-cf",
                context / "root.tar",
                ".",
            ]
        )
        (context / "Dockerfile").write_text("FROM scratch\nADD root.tar /\n")
        _build(IMAGES.debian, context / "Dockerfile", context)
    shutil.rmtree(context)


def _build_binary(image: str, binary: Path, instructions: str) -> None:
    """An image of one static binary at /bin."""
    context = CACHE.images / "binary"
    shutil.rmtree(context, ignore_errors=True)
    (context / "bin").mkdir(parents=True)
    shutil.copy2(binary, context / "bin" / binary.name)
    (context / "Dockerfile").write_text(
        f"FROM scratch\nCOPY bin /bin\nENV PATH=/bin\n{instructions}\n"
    )
    _build(image, context / "Dockerfile", context)
    shutil.rmtree(context)
