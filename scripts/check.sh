#!/usr/bin/env bash
# check.sh [--fast]: format, lint, types, import directions, what tests import, words, sizes, duplicates, the chart,
# its copies and the reference.  Runs them all, then says which failed.  --fast leaves out types and the chart: seconds, not a minute.
set -uo pipefail
cd "$(dirname "$0")/.."

fast=${1:-}
failed=()

run() { # run NAME COMMAND...
    local name=$1
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}

slow() { # as run; left out by --fast
    [ "$fast" = --fast ] || run "$@"
}

run format .venv/bin/ruff format --check .
run lint .venv/bin/ruff check .
slow types .venv/bin/mypy schema/src worker/src operator/src simulator/src
slow bench-types env MYPYPATH=bench:schema/src:worker/src:operator/src:simulator/src .venv/bin/mypy bench
run imports .venv/bin/lint-imports
run tests .venv/bin/python scripts/check_tests.py
run words .venv/bin/python scripts/check_words.py
run names .venv/bin/python scripts/check_names.py
run sizes .venv/bin/python scripts/check_sizes.py
run duplicates .venv/bin/python scripts/check_duplicates.py
slow chart make --no-print-directory lint-chart
run crds .venv/bin/python scripts/crds.py --check
run charts .venv/bin/python scripts/chart_copies.py --check
run reference .venv/bin/python scripts/reference.py --check
run cli .venv/bin/python scripts/cli_page.py --check

if [ "${#failed[@]}" -gt 0 ]; then
    echo "check: failed: ${failed[*]}"
    exit 1
fi
echo "check: all passed"
