"""Write crds/*.yaml from the types of schema/.

`crds.py` writes them; `crds.py --check` changes nothing, and exits 1 when a file is not what the
types say.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from pdcluster_schema.crd.definitions import pdcluster_crd, pool_scaler_crd

ROOT = Path(__file__).parents[1]
HEAD = "# Made from the types in schema/ by `make charts`.\n"


class Dumper(yaml.SafeDumper):
    """A section that stands in several places is written once, with an anchor."""

    def ignore_aliases(self, data: Any) -> bool:
        is_section = isinstance(data, dict) and "properties" in data
        return not is_section


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Write, or check with `--check`; returns the exit status."""
    files = {
        root / "crds" / f"{name}.yaml": text(crd)
        for name, crd in (("pdcluster", pdcluster_crd()), ("pdpoolscaler", pool_scaler_crd()))
    }
    if list(arguments) != ["--check"]:
        for path, content in files.items():
            path.write_text(content)
        return 0
    different = [path.name for path, content in files.items() if not _has(path, content)]
    print(
        f"crds: {len(files)} files"
        + "".join(f"; {name} is not what the types say: run `make charts`" for name in different)
    )
    return 1 if different else 0


def text(crd: dict[str, Any]) -> str:
    """A CRD as YAML."""
    return HEAD + yaml.dump(crd, Dumper=Dumper, sort_keys=False, width=100, allow_unicode=True)


def _has(path: Path, content: str) -> bool:
    return path.is_file() and path.read_text() == content


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
