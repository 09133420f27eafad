"""The kernel's control groups, as a cluster finds and leaves them.

    python -m e2e.rig.control_groups NAME      in a mount namespace of its own: remove the groups of
    that name

Needs nothing but the standard library, like all that ends a cluster.
"""

import os
import subprocess
import sys
from pathlib import Path

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def mount_control_groups() -> None:
    """Mount the kernel's control groups at the usual place (a bare chroot has none)."""
    hierarchies = [
        line.split(":")[1] for line in Path("/proc/self/cgroup").read_text().splitlines()
    ]
    if hierarchies == [""]:
        _mount("cgroup2", "cgroup2", CONTROL_GROUPS)
        return
    _mount("tmpfs", "tmpfs", CONTROL_GROUPS)
    for names in filter(None, hierarchies):
        place = CONTROL_GROUPS / names.removeprefix("name=")
        place.mkdir()
        _mount(
            "cgroup", "-o", f"none,{names}" if names.startswith("name=") else names, "cgroup", place
        )
        for name in names.split(",")[1:]:
            (CONTROL_GROUPS / name).symlink_to(place.name)


def make_control_groups(name: str) -> None:
    """An empty group in each hierarchy."""
    for hierarchy in _hierarchies():
        (hierarchy / name).mkdir(exist_ok=True)


def remove_control_groups(name: str) -> None:
    """Remove a cluster's groups, the deepest first.  Its processes are gone by now."""
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / name, topdown=False):
            Path(folder).rmdir()


def _hierarchies() -> list[Path]:
    if (CONTROL_GROUPS / "cgroup.controllers").exists():
        return [CONTROL_GROUPS]
    return [path for path in CONTROL_GROUPS.iterdir() if path.is_dir() and not path.is_symlink()]


def _mount(kind: str, *arguments: object) -> None:
    subprocess.run(["mount", "-t", kind, *map(str, arguments)], check=True)


if __name__ == "__main__":
    mount_control_groups()
    remove_control_groups(sys.argv[1])
