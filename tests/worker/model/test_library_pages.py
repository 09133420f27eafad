"""Pages of libraries that loading has read: they go, and what they hold is there when it is
needed.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from pdcluster_worker.model.memory import unchanged_ranges

PROGRAM = """
import torch
from pathlib import Path
from pdcluster_worker.model.memory import release_library_pages

def resident(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(kind))

torch.manual_seed(1)
left = torch.randn(64, 64)
before, product = resident("RssFile"), left @ left
written = resident("RssAnon")
release_library_pages()
after = resident("RssFile")
assert torch.equal(left @ left, product)
assert torch.linalg.inv(left).isfinite().all()
print(before, after, written, resident("RssAnon"))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_pages_go_and_libraries_compute_on() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    before, after, written, still_written = map(int, ended.stdout.split())

    assert after < before * 0.7
    assert still_written > written - 1024  # kB: nothing that was written is given up


def mapping(address: str, access: str, path: str, anonymous: int = 0, swap: int = 0) -> str:
    """An entry of smaps, as far as it counts here."""
    return (
        f"{address} {access} 00000000 08:01 7                {path}\n"
        f"Rss:                   8 kB\nAnonymous:           {anonymous:5} kB\n"
        f"AnonHugePages:         0 kB\nSwap:                {swap:5} kB\n"
        "SwapPss:               0 kB\nVmFlags: rd ex mr mw me\n"
    )


def test_only_code_of_libraries_that_is_as_in_the_file_is_let_go() -> None:
    kept = [
        mapping("1000-2000", "rw-p", "/lib/libtorch.so"),
        mapping("1000-2000", "r--p", "/lib/libtorch.so"),  # perhaps relocated, and protected then
        mapping("1000-2000", "r-xp", "/lib/libtorch.so", anonymous=4),  # a breakpoint
        mapping("1000-2000", "r-xp", "/lib/libtorch.so", swap=4),
        mapping("1000-2000", "r-xs", "/models.so/model.safetensors"),
        mapping("1000-2000", "r-xp", "/models.so/python3"),
        mapping("1000-2000", "r-xp", "[vdso]"),
        "1000-2000 r-xp 00000000 08:01 7 /lib/libtorch.so\nRss: 8 kB\n",
        "",
    ]
    for smaps in kept:
        assert unchanged_ranges(smaps + mapping("2000-3000", "---p", "")) == []
        gone = mapping("7f0000-7f9000", "r-xp", "/a folder/lib\u2028\udcff c.so.6 (deleted)")
        assert unchanged_ranges(smaps + gone) == [(0x7F0000, 0x7F9000)]
