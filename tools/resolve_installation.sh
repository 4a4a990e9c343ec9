#!/bin/sh
# Asks pip what `make install-gpu` would install from the ordinary package index, without installing it: with the pinned
# versions, and with `newest` as they are published today. Prints the number of packages and the main versions.
# The machine's own sources of packages are not used, because another machine does not have them.
set -eu
cd "$(dirname "$0")/.."
export PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS= PIP_EXTRA_INDEX_URL=

constraint="--constraint requirements/cuda.lock.txt"
[ "${1:-}" = newest ] && constraint=
report=$(mktemp)
trap 'rm -f "$report"' EXIT
# shellcheck disable=SC2086
${PYTHON:-python3} -m pip install --quiet --dry-run --ignore-installed --report "$report" $constraint ".[cuda]"
${PYTHON:-python3} - "$report" <<'PYTHON'
import json
import sys

found = {one["metadata"]["name"].lower(): one["metadata"]["version"] for one in json.load(open(sys.argv[1]))["install"]}
print(f"{len(found)} packages:", ", ".join(f"{name} {found[name]}" for name in ("torch", "vllm", "transformers", "ray")))
PYTHON
