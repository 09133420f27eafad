"""Folders of this process's cgroups, v1 and v2."""

from pathlib import Path, PurePosixPath

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")


def parse_cgroup_paths(text: str, controller: str) -> tuple[str | None, str | None]:
    """(v2, v1) paths from /proc/self/cgroup, lines `id:controllers:path`."""
    v2 = v1 = None
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            v2 = path
        elif controller in controllers.split(","):
            v1 = path
    return v2, v1


def lineage(root: Path, path: str | None) -> list[Path]:
    """The cgroup's folder and its ancestors up to `root`; in a container only `root` may exist."""
    if path is None:
        return [root]
    own = PurePosixPath(path.lstrip("/"))
    return [root / part for part in (own, *own.parents)]


def read(path: Path) -> str:
    """Empty where there is no such file."""
    try:
        return path.read_text()
    except OSError:
        return ""
