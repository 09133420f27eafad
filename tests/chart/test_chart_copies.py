"""The chart's copies are those of their originals, and the script that keeps them so."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def chart_copies() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "chart_copies", ROOT / "scripts" / "chart_copies.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tmp_path: Path, chart_copies: ModuleType) -> Path:
    """A repository with a CRD, a sample and their copies."""
    for folder in ("crds", "examples", "operator/src/pdctl/local", "charts/pdcluster/monitoring"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "charts/pdcluster/monitoring/alerts.yaml").write_text("groups: []\n")
    (tmp_path / "crds" / "thing.yaml").write_text("kind: Thing\n")
    (tmp_path / "examples" / "hugging-face.yaml").write_text("kind: PDCluster\n")
    assert chart_copies.main([], tmp_path) == 0
    return tmp_path


def test_check_passes_on_fresh_copies(
    tree: Path, chart_copies: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chart_copies.main(["--check"], tree) == 0
    assert capsys.readouterr().out.strip() == "chart_copies: 3 files, 0 problems"


CRDS = Path("charts/pdcluster/crds")
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        lambda crds: (crds / "thing.yaml").unlink(),
        f"{CRDS}/thing.yaml: missing: it is a copy of crds/thing.yaml",
    ),
    "different": (
        lambda crds: (crds / "thing.yaml").write_text("kind: Other\n"),
        f"{CRDS}/thing.yaml: differs from crds/thing.yaml, which is the one to edit",
    ),
    "left over": (
        lambda crds: (crds / "old.yaml").write_text("kind: Old\n"),
        f"{CRDS}/old.yaml: a copy of nothing: remove it",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_check_names_the_copy_and_copying_mends_it(
    damage: Callable[[Path], object],
    message: str,
    tree: Path,
    chart_copies: ModuleType,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(tree / CRDS)

    assert chart_copies.main(["--check"], tree) == 1
    assert capsys.readouterr().out.splitlines() == [
        message,
        "chart_copies: 3 files, 1 problems; run `make charts`",
    ]
    assert chart_copies.main([], tree) == 0
    assert chart_copies.main(["--check"], tree) == 0
