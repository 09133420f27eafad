#!/usr/bin/env bash
# release_images.sh [FOLDER]: the operator's image and two variants of the worker's as OCI archives, into dist/.
#   BUILDAH      the command, with its global options; unset = buildah
#   BASE_IMAGE   an image with Python 3.11 or newer; unset = the Dockerfiles'
#   PLATFORMS    such as linux/amd64,linux/arm64 (other machines' need binfmt and qemu-user-static); unset = this machine's
#   IMAGES       of "operator worker server"; VARIANT of the worker's: cpu, cpu-pypi or cuda
set -euo pipefail
cd "$(dirname "$0")/.."

dist=$(mkdir -p "${1:-dist}" && cd "${1:-dist}" && pwd)
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' operator/src/pdctl/__init__.py)
revision=$(git rev-parse HEAD)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
read -ra buildah <<<"${BUILDAH:-buildah}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
options=(--layers --network=host --format=oci --timestamp "$SOURCE_DATE_EPOCH" --build-arg "VERSION=$version" --build-arg "REVISION=$revision")
[ -z "${BASE_IMAGE:-}" ] || options+=(--build-arg "BASE_IMAGE=$BASE_IMAGE")
[ -z "${PLATFORMS:-}" ] || options+=(--platform "$PLATFORMS")

for image in ${IMAGES:-operator worker server}; do
    case $image in
    operator) file=Dockerfile.operator own=() ;;
    worker) file=Dockerfile.worker own=(--build-arg "VARIANT=${VARIANT:-cpu}") ;;
    server) file=Dockerfile.worker own=(--build-arg VARIANT=server) ;;
    *) echo "IMAGES: operator, worker or server, not $image" >&2 && exit 2 ;;
    esac
    name=pdcluster-$image:$version archive=$dist/pdcluster-$image-$version.oci.tar
    # buildah 1.28, Debian's, empties a file system after a mount of a cache; without one, none may stay in the image
    sed -zE -e 's/--mount=type=(cache|secret),\S+\s+(\\\n\s*)?/no-cache /g' -e 's/(no-cache )+/export UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 \&\& /g' \
        "$file" >"$work/$file"
    "${buildah[@]}" manifest rm "$name" 2>/dev/null || true
    "${buildah[@]}" build "${options[@]}" "${own[@]}" -f "$work/$file" --manifest "$name" .
    rm -f "$archive"
    "${buildah[@]}" manifest push --all "$name" "oci-archive:$archive:docker.io/library/$name" # as kubelets spell its plain name
done
(cd "$dist" && sha256sum -- *"$version"* >SHA256SUMS && cat SHA256SUMS)
