# shellcheck shell=bash
# Shared by the scripts here: the repository root, the tools' environment, timed stages and their summary.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$PWD/build/venv
jobs=$(nproc)
export PATH=$venv/bin:$PATH CMAKE_BUILD_PARALLEL_LEVEL=$jobs CTEST_PARALLEL_LEVEL=$jobs

# Where there is ccache, the library that the C++ tests link, that of the Python package and the parts of the emulated
# build that are not emulated are compiled once.
if [[ -z ${CMAKE_CXX_COMPILER_LAUNCHER:-} ]] && command -v ccache >/dev/null; then
    export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=$PWD
fi

stage_lines=()
failed_stages=0

# stage NAME COMMAND...: runs it, prints and remembers how long it took and whether it failed, and goes on.
stage() {
    local name=$1 start=$SECONDS outcome=ok
    shift
    printf '\n=== %s\n' "$name"
    # `set -e` is ignored inside a command that `||` or `if` looks at, so the status is read afterwards.
    set +e
    (
        set -euo pipefail
        "$@"
    )
    stage_status=$?
    set -e
    if ((stage_status != 0)); then
        outcome="FAILED ($stage_status)"
        failed_stages=$((failed_stages + 1))
    fi
    stage_lines+=("$(printf '%-28s %5d s  %s' "$name" $((SECONDS - start)) "$outcome")")
}

# A stage that every later one needs.
required_stage() {
    stage "$@"
    ((stage_status == 0)) || summary
}

# Prints the table and exits, non-zero when a stage failed.
summary() {
    printf '\n=== summary\n'
    printf '%s\n' "${stage_lines[@]}" "$(printf '%-28s %5d s' total "$SECONDS")"
    exit $((failed_stages > 0))
}

# debian_packages NAME...: installs what is missing, where this is Debian and we are root; otherwise leaves it be.
debian_packages() {
    local missing=() name
    command -v apt-get >/dev/null && command -v dpkg-query >/dev/null || return 0
    for name in "$@"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null) == installed ]] || missing+=("$name")
    done
    ((${#missing[@]} > 0)) || return 0
    if ((EUID != 0)); then
        echo "not root, so not installed: ${missing[*]}"
        return 0
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
}

# What the tests compare with, beside frameworks.
oracles=(ml_dtypes gfloat safetensors matplotlib)

# bare_python FOLDER PACKAGE...: a Python at FOLDER with NumPy, what runs tests, and these packages at their pinned
# versions. It has no framework, and its bin no compiler.
bare_python() {
    local folder=$1 names
    shift
    names=$(IFS='|' && echo "numpy|pytest|pytest-xdist|hypothesis${1:+|$*}")
    python -m venv --clear "$folder"
    grep -E "^($names)==" .ci/requirements-test.txt >"$folder/requirements.txt"
    "$folder/bin/pip" install --quiet --only-binary :all: -r "$folder/requirements.txt"
}
