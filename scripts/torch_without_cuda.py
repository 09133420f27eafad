# /// script
# requires-python = ">=3.11"
# dependencies = ["pyelftools==0.33", "ziglang==0.17.1"]
# ///
"""Let torch's build for CUDA, the only one of PyPI for Linux, run on CPUs without CUDA's libraries.

    uv run --script scripts/torch_without_cuda.py .venv/bin/python

torch links 13 of them, 3 GB, when it is imported, and calls none of their functions on a CPU.  Each
that is not installed gets a stand-in of some kilobytes in torch/lib, whose functions all return an
error, and its text where that is asked for: torch.cuda.is_available() is False, and what needs a
GPU raises.  Does nothing where they are installed, or for torch's build for CPUs.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from elftools.elf.elffile import ELFFile

NVIDIA = ("libcu", "libnccl", "libnvrtc", "libnvshmem")
DRIVER = "libcuda.so.1"  # of the machine; torch looks for it by itself
NO_DEVICE = 100  # cudaErrorNoDevice, and no success anywhere else
TEXT = re.compile(r"(Error|Status)(String|Name)$")  # of functions that return a text
TRIAL = """
import torch
assert not torch.cuda.is_available()
torch.ones(2, 2).matmul(torch.ones(2))
for call in torch.cuda.is_current_stream_capturing, torch.cuda.init, torch.cuda.device_count:
    try:  # transformers asks the first on every machine: an error is raised, and none ends Python
        call()
    except (RuntimeError, AssertionError):
        pass
"""

Symbols = dict[str, dict[str, set[str]]]
"""Library -> version of the symbols, empty = none -> names."""


def main(python: str) -> int:
    """Returns the exit status: 1 where torch cannot be imported afterwards."""
    folder = torch_libraries(python)
    if installed(folder) or not (symbols := needed_symbols(sorted(folder.glob("lib*.so")))):
        return 0
    with tempfile.TemporaryDirectory() as work:
        for library, versions in symbols.items():
            compile_stand_in(Path(work), folder / library, versions)
    trial = subprocess.run([python, "-c", TRIAL], capture_output=True, text=True, check=False)
    if trial.returncode:
        for library in symbols:
            (folder / library).unlink()
        print(f"torch_without_cuda: torch does not run:\n{trial.stderr}", file=sys.stderr)
        return 1
    print(f"torch_without_cuda: {len(symbols)} stand-ins for CUDA's libraries in {folder}")
    return 0


def torch_libraries(python: str) -> Path:
    """torch/lib of an environment, without importing torch."""
    code = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    return Path(subprocess.check_output([python, "-c", code], text=True).strip()) / "lib"


def installed(folder: Path) -> bool:
    """The packages of CUDA's libraries are there."""
    return any((folder.parents[1] / "nvidia").glob("*/lib/libcudart.so*"))


def needed_symbols(libraries: list[Path]) -> Symbols:
    """Name NVIDIA's libraries and symbols that these need."""
    symbols: Symbols = defaultdict(lambda: defaultdict(set))
    unversioned: set[str] = set()
    for path in libraries:
        with path.open("rb") as file:
            elf = ELFFile(file)
            for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED"):
                if tag.needed.startswith(NVIDIA) and tag.needed != DRIVER:
                    symbols[tag.needed][""] |= set()
            unversioned |= read_undefined(elf, symbols)
    for library, versions in symbols.items():
        prefix = library.removeprefix("lib").partition(".")[0].lower()
        versions[""] |= {name for name in unversioned if name.lower().startswith(prefix)}
    return symbols


def read_undefined(elf: ELFFile, symbols: Symbols) -> set[str]:
    """Add the versioned symbols of NVIDIA's libraries; returns the names without a version."""
    sources = {
        auxiliary["vna_other"]: (need.name, auxiliary.name)
        for need, versions in elf.get_section_by_name(".gnu.version_r").iter_versions()
        for auxiliary in versions
    }
    table, indices = elf.get_section_by_name(".dynsym"), elf.get_section_by_name(".gnu.version")
    unversioned = set()
    for number, symbol in enumerate(table.iter_symbols()):
        if symbol["st_shndx"] != "SHN_UNDEF" or symbol["st_info"]["bind"] == "STB_WEAK":
            continue
        library, version = sources.get(indices.get_symbol(number)["ndx"], ("", ""))
        if not library:
            unversioned.add(symbol.name)
        elif library.startswith(NVIDIA):
            symbols[library][version].add(symbol.name)
    return unversioned


def compile_stand_in(work: Path, target: Path, versions: dict[str, set[str]]) -> None:
    """A library with a function for each name."""
    names = sorted(set().union(*versions.values()))
    source, script = work / "stand_in.c", work / "versions"
    source.write_text("".join(map(function, names)))
    nodes = {version: sorted(found) for version, found in versions.items() if version}
    script.write_text(
        "".join(f"{node} {{ {'; '.join(found)}; }};\n" for node, found in sorted(nodes.items()))
    )
    command = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-g0", "-O1", "-w"]
    options = [f"-Wl,--version-script={script}"] if nodes else []
    part = work / target.name  # uv links its cache's files: never write into one
    subprocess.run(
        [*command, "-fno-builtin", *options, f"-Wl,-soname,{target.name}", source, "-o", part],
        check=True,
    )
    target.write_bytes(part.read_bytes())


def function(name: str) -> str:
    """C of a function."""
    if TEXT.search(name):
        return f'const char *{name}(void) {{ return "this torch runs without CUDA"; }}\n'
    return f"int {name}(void) {{ return {NO_DEVICE}; }}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
