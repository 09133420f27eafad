"""One version everywhere: the newest release of the changelog, the distributions, the chart, the
images, the docs.
"""

import re
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADINGS = re.findall(
    r"^## \[(.+?)\](?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
)
VERSION = HEADINGS[1][0]

NUMBER = r"(\d+\.\d+\.\d+)"
IN_FILES = {
    "schema/pyproject.toml": rf'^version = "{NUMBER}"$',
    "operator/pyproject.toml": rf'^version = "{NUMBER}"$',
    "simulator/pyproject.toml": rf'^version = "{NUMBER}"$',
    "worker/pyproject.toml": rf'^version = "{NUMBER}"$',
    "charts/pdcluster/Chart.yaml": rf"^(?:version|appVersion): {NUMBER}\b",
    "Dockerfile.operator": rf"^ARG VERSION={NUMBER}$",
    "Dockerfile.worker": rf"^ARG VERSION={NUMBER}$",
    "CITATION.cff": rf"^version: {NUMBER}$",
    "docs/gitops.md": rf"\bv{NUMBER}\b",
}
IMAGES = rf"\bpdcluster-(?:operator|worker|server):{NUMBER}"


def test_unreleased_stands_above_releases_that_have_a_date() -> None:
    first, *releases = HEADINGS

    assert first == ("Unreleased", "")
    assert [date.fromisoformat(day) for _, day in releases] == sorted(
        (date.fromisoformat(day) for _, day in releases), reverse=True
    )


@pytest.mark.parametrize(("path", "pattern"), IN_FILES.items(), ids=IN_FILES)
def test_version_of_a_file_is_the_newest_release(path: str, pattern: str) -> None:
    assert set(re.findall(pattern, (ROOT / path).read_text(), re.MULTILINE)) == {VERSION}


@pytest.mark.parametrize("distribution", ["operator", "simulator", "worker"])
def test_version_of_every_package_is_the_newest_release(distribution: str) -> None:
    packages = (ROOT / distribution / "src").glob("*/__init__.py")
    texts = " ".join(path.read_text() for path in packages)

    assert set(re.findall(r'^__version__ = "(.*)"', texts, re.MULTILINE)) == {VERSION}


def test_images_of_docs_and_sources_have_the_version_as_tag() -> None:
    files = [*ROOT.glob("Dockerfile.*"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*/src/**/*.py")]
    tags = {tag for path in files for tag in re.findall(IMAGES, path.read_text())}

    assert tags == {VERSION}
