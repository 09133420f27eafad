"""Pages of libraries that loading has read: they go, and what they hold is there when it is
needed.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from pdcluster_worker.model.ops.library_pages import unchanged_ranges

PROGRAM = """
import torch, transformers.models.llama.modeling_llama
from pathlib import Path
from pdcluster_worker.model.ops.library_pages import release_library_pages

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
import transformers.models.qwen3.modeling_qwen3, PIL.Image
print(before, after, written, resident("RssAnon"))
"""


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
def test_pages_go_and_libraries_compute_on() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    before, after, written, still_written = map(int, ended.stdout.split())

    assert after < before / 2
    assert still_written > written - 1024  # kB: nothing that was written is given up


def test_only_libraries_that_nothing_can_or_did_write_are_let_go() -> None:
    def mapping(address: str, access: str, path: str, anonymous: int) -> str:
        return (
            f"{address} {access} 00000000 08:01 7                {path}\n"
            f"Rss:                   8 kB\nAnonymous:           {anonymous:5} kB\n"
            "VmFlags: rd ex mr mw me\n"
        )

    smaps = "".join(
        [
            mapping("1000-2000", "r-xp", "/lib/libtorch.so", 0),
            mapping("2000-3000", "rw-p", "/lib/libtorch.so", 0),
            mapping("3000-4000", "r--p", "/lib/libtorch.so", 4),
            mapping("4000-5000", "---p", "", 0),
            mapping("5000-6000", "r--s", "/models.so/model.safetensors", 0),
            mapping("6000-7000", "r--p", "/usr/bin/python3", 0),
            mapping("7000-8000", "rw-p", "", 0),
            mapping("7f0000-7f9000", "r--p", "/a folder/lib c.so.6 (deleted)", 0),
        ]
    )

    assert list(unchanged_ranges(smaps)) == [(0x1000, 0x1000), (0x7F0000, 0x9000)]
    assert list(unchanged_ranges("")) == []
