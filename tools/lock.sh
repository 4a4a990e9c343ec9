#!/bin/sh
# Writes requirements/*.lock.txt: the version of everything that `make` and `make install-gpu` install.
# Versions that still fit are kept. `tools/lock.sh --upgrade` takes the newest ones. `make lock` has uv at hand.
set -eu
cd "$(dirname "$0")/.."

lock() {  # name of the environment, flags for uv
    name=$1 file=requirements/$1.lock.txt
    shift
    uv pip compile --quiet --python-version 3.11 --python-platform x86_64-manylinux_2_28 --no-header --no-annotate \
        --output-file "$file" "$@" pyproject.toml
    {
        echo "# Made by \`make lock\` for Python 3.11 on Linux and x86-64. pip reads this file as constraints, so it installs"
        echo "# nothing of it that is not asked for: nvidia-* only come with a CUDA build of torch."
        cat "$file" "requirements/$name-no-deps.txt" | grep -v "^#" | LC_ALL=C sort
    } > "$file.new"
    mv "$file.new" "$file"
}

lock cpu --extra cpu --extra test --extra reasoning-gym "$@"
lock cuda --extra cuda "$@"
