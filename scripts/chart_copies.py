"""Keep the chart's copies of files that have their home elsewhere: the CRDs, and the sample
cluster; and pdctl's copy of the chart's alerts.

A chart and a wheel can only hold what lies below them.  `chart_copies.py` makes
the copies; `chart_copies.py --check` changes nothing, names each copy that is
missing, different or left over, and exits 1 when there is one.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHART = Path("charts/pdcluster")


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Copy, or check with `--check`; returns the exit status."""
    problems = list(differences(root))
    if list(arguments) == ["--check"]:
        print(
            "\n".join(
                [
                    *problems,
                    f"chart_copies: {len(wanted(root))} files, {len(problems)} problems"
                    + "; run `make charts`" * bool(problems),
                ]
            )
        )
        return 1 if problems else 0
    for copy in left_over(root):
        copy.unlink()
    for copy, source in wanted(root).items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    return 0


def wanted(root: Path) -> dict[Path, Path]:
    """Each copy and the file that it is a copy of."""
    sample = root / "examples" / "hugging-face.yaml"
    crds = {
        root / CHART / "crds" / path.name: path for path in sorted((root / "crds").glob("*.yaml"))
    }
    alerts = root / CHART / "monitoring" / "alerts.yaml"
    return {
        **crds,
        root / CHART / "files" / sample.name: sample,
        root / "operator" / "src" / "pdctl" / "local" / alerts.name: alerts,
    }


def left_over(root: Path) -> list[Path]:
    """Files beside the copies that are a copy of nothing."""
    beside = {*(root / CHART / "crds").glob("*"), *(root / CHART / "files").glob("*")}
    return sorted(beside - set(wanted(root)))


def differences(root: Path) -> Iterator[str]:
    """One line for each copy that is not as it should be."""
    for copy, source in wanted(root).items():
        if not copy.is_file():
            yield f"{copy.relative_to(root)}: missing: it is a copy of {source.relative_to(root)}"
        elif copy.read_bytes() != source.read_bytes():
            yield (
                f"{copy.relative_to(root)}: differs from {source.relative_to(root)}, which is the "
                "one to edit"
            )
    for copy in left_over(root):
        yield f"{copy.relative_to(root)}: a copy of nothing: remove it"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
