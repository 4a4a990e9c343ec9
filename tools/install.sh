#!/bin/sh
# tools/install.sh VENV: installs what runs on the CPU, in the versions of requirements/cpu.lock.txt. First what OpenRLHF
# and vLLM import; then these two without their dependencies (requirements/cpu-no-deps.txt says why).
#
# uv does it in a third of pip's time. It does not read pip's configuration, so it is told where pip finds packages. If
# there is no uv, or if it fails, pip does it.
set -eu
venv=$1

install() { # the command that installs
    "$@" --constraint requirements/cpu.lock.txt --editable ".[cpu,test]" &&
        "$@" --no-deps --requirement requirements/cpu-no-deps.txt || return
    # Without a C compiler this fails. Then the task reasoning_gym says what is missing, and its tests are skipped.
    "$@" --constraint requirements/cpu.lock.txt --editable ".[reasoning-gym]" ||
        echo "the package reasoning-gym cannot be installed here, so the task of that name does not work" >&2
}

setting() { # what pip's configuration says about an option: its environment first, then its files, all on one line
    "$venv/bin/pip" config list | sed -n "s/^\(:env:\|[a-z]*\)\.$1='\(.*\)'\$/\2/p" | tr '\n' ' ' | sed 's/\\n/ /g; s/ *$//'
}

with_uv() {
    "$venv/bin/pip" install --quiet --no-compile uv || return
    set -- "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --index-strategy unsafe-best-match
    for place in $(setting index-url); do set -- "$@" --default-index "$place"; done
    for place in $(setting extra-index-url); do set -- "$@" --index "$place"; done
    for place in $(setting find-links); do set -- "$@" --find-links "$place"; done
    certificates=$(setting cert)
    [ -z "$certificates" ] || export SSL_CERT_FILE="${certificates%% *}"
    install "$@"
}

# Neither compiles what it installs, because most of it is never imported. Python compiles the rest on its first import.
with_uv || install "$venv/bin/pip" install --quiet --no-compile
