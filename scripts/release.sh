#!/usr/bin/env bash
# release.sh [FOLDER]: what a release consists of but its images, into dist/: wheels, the chart's archive, bills of
# materials (CycloneDX) and SHA256SUMS.  The same tree makes the same bytes; docs/releasing.md.
# HOME_PAGE: the project's address, for the chart, where it has one.
set -euo pipefail
cd "$(dirname "$0")/.."

dist=$(mkdir -p "${1:-dist}" && cd "${1:-dist}" && pwd)
uv=$PWD/.venv/bin/uv
helm=$PWD/.venv/bin/helm
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' operator/src/pdctl/__init__.py)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
umask 022
rm -f "$dist"/pdcluster*-* "$dist"/pdcluster-*.tgz "$dist/SHA256SUMS"

# Tracked files alone, with the licence in each wheel, and every distribution bound to its own version of the others.
git ls-files -z schema operator worker simulator charts | xargs -0 tar --mode=u=rwX,go=rX -c | tar -x -C "$work"
for part in schema operator worker simulator; do
    cp LICENSE "$work/$part/"
    sed -Ei "/^name/! s/\"(pdcluster(-(schema|worker|simulator))?)\"/\"\1==$version\"/" "$work/$part/pyproject.toml"
done

build() { # build PART
    "$uv" build --quiet --wheel --build-constraint constraints.txt --out-dir "$dist" "$work/$1"
}
build schema
build operator
build simulator
for machine in x86_64 aarch64; do
    PDCLUSTER_KERNELS_FOR=$machine build worker
    rm -rf "$work/worker/build"
done
rm -f "$dist/.gitignore"

[ -z "${HOME_PAGE:-}" ] || echo "home: $HOME_PAGE" >>"$work/charts/pdcluster/Chart.yaml"
"$helm" package "$work/charts/pdcluster" --destination "$work" >/dev/null
mkdir "$work/chart"
tar --touch -xzf "$work/pdcluster-$version.tgz" -C "$work/chart" # packed again: Helm writes the time of day into it
tar -C "$work/chart" --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX -c pdcluster |
    gzip -9n >"$dist/pdcluster-$version.tgz"

cp constraints.txt "$dist/pdcluster-$version-constraints.txt"

"$uv" venv --quiet "$work/cyclonedx"
"$uv" pip install --quiet --python "$work/cyclonedx/bin/python" --no-deps -r requirements-release.txt
materials() { # materials NAME REQUIREMENT: of an environment with it, for CPUs
    "$uv" venv --quiet "$work/$1"
    "$uv" pip install --quiet --python "$work/$1/bin/python" --find-links "$dist" -c constraints.txt \
        --excludes scripts/cuda_packages.txt --excludes <(echo triton) "$2==$version"
    "$work/cyclonedx/bin/cyclonedx-py" environment --short-PURLs --output-reproducible \
        -o "$dist/$1-$version.cdx.json" "$work/$1/bin/python"
    rm -rf "${work:?}/$1"
}
materials pdcluster pdcluster
materials pdcluster-worker "pdcluster[worker]"

(cd "$dist" && sha256sum -- *"$version"* >SHA256SUMS && cat SHA256SUMS)
