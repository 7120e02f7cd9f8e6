# shellcheck shell=bash
# Shared by the scripts here: the repository root, the tools' environment, timed stages and their summary.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$PWD/build/venv
jobs=$(nproc)
export PATH=$venv/bin:$PATH CMAKE_BUILD_PARALLEL_LEVEL=$jobs CTEST_PARALLEL_LEVEL=$jobs
# Most modules of the tools that pip installs are never imported: Python compiles those that are.
export PIP_COMPILE=0

# Where there is ccache, what two builds compile alike is compiled once: their folders must be as deep, so that the paths
# to the sources are the same, and their options equal, -Werror among them (BRECCIA_WERROR).
# What a precompiled header precedes it would not take up, unless told not to look for definitions in it.
use_ccache() {
    export CCACHE_SLOPPINESS=${CCACHE_SLOPPINESS:-pch_defines,time_macros}
    if [[ -z ${CMAKE_CXX_COMPILER_LAUNCHER:-} ]] && command -v ccache >/dev/null; then
        export CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
    fi
}
use_ccache

# What the stages of this script took, and, indented, those of the scripts that they ran.
stage_times=$(mktemp)
outer_times=${STAGE_TIMES:-}
failed_stages=0
# What a stage leaves for temporary ends with it, whatever it ran and however that ended.
temporary=
touched=
clean_up() { rm -rf "$stage_times" ${temporary:+"$temporary"} ${touched:+"$touched"}; }
trap clean_up EXIT

# Sets processor_time: seconds of what this shell has waited for. (In a substitution it would be another shell.)
get_processor_time() {
    local said
    said=$(mktemp)
    times >"$said"
    processor_time=$(awk 'NR == 2 { split($1, of_user, /[ms]/); split($2, of_system, /[ms]/)
        print int((of_user[1] + of_system[1]) * 60 + of_user[2] + of_system[2]) }' "$said")
    rm -f "$said"
}

# stage NAME COMMAND...: runs it, prints and remembers how long it took, of how much processor time (less than $jobs
# times as much leaves some idle) and whether it failed, and goes on.
stage() {
    local name=$1 start=$SECONDS outcome=ok inner before
    shift
    get_processor_time
    before=$processor_time
    inner=$(mktemp)
    temporary=$(mktemp -d "${TMPDIR:-/tmp}/ci-XXXXXX")
    printf '\n=== %s\n' "$name"
    # `set -e` is ignored inside a command that `||` or `if` looks at, so the status is read afterwards.
    set +e
    (
        trap - EXIT
        export STAGE_TIMES=$inner TMPDIR=$temporary
        set -euo pipefail
        "$@"
    )
    stage_status=$?
    set -e
    if ((stage_status != 0)); then
        outcome="FAILED ($stage_status)"
        failed_stages=$((failed_stages + 1))
    fi
    get_processor_time
    printf '%-30s %5d s %6d s  %s\n' "$name" $((SECONDS - start)) $((processor_time - before)) "$outcome" \
        >>"$stage_times"
    sed 's/^/  /' "$inner" >>"$stage_times"
    rm -rf "$inner" "$temporary"
}

# A stage that every later one needs.
required_stage() {
    stage "$@"
    ((stage_status == 0)) || summary
}

# Prints the table and exits, non-zero when a stage failed.
summary() {
    printf '\n=== summary: seconds, and those of processors\n'
    cat "$stage_times"
    get_processor_time
    printf '%-30s %5d s %6d s\n' total "$SECONDS" "$processor_time"
    [[ -z $outer_times ]] || cat "$stage_times" >>"$outer_times"
    exit $((failed_stages > 0))
}

# told LOG STATUS: what a command said that ran in the meantime, and whether it failed.
told() {
    cat "$1"
    return "$2"
}

# take_turns N ARGUMENTS...: of cases that are alike, of C++ tests that draw them (tests_cpp/support.hpp) and of Python
# tests (tests_py/conftest.py), one of N runs, by the turn that .ci/run gives or the count of commits, so that every case
# runs within N turns; all where the first argument is --whole, and all of the Python tests that .ci/touched_tests.py
# names.
take_turns() {
    [[ ${2:-} == --whole ]] && return
    export BRECCIA_TESTS_ONE_OF=$1 BRECCIA_TESTS_TURN
    : "${BRECCIA_TESTS_TURN:=$(git rev-list --count HEAD 2>/dev/null || echo 0)}"
    find_touched
}

# Once for all stages of a run: BRECCIA_TESTS_TOUCHED is a file, as an environment may not hold so many names.
find_touched() {
    [[ -z ${BRECCIA_TESTS_TOUCHED:-} ]] || return 0
    touched=$(mktemp)
    "${PYTHON:-python3}" .ci/touched_tests.py >"$touched"
    export BRECCIA_TESTS_TOUCHED=$touched
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

# beside_build_venv FOLDER LIST: a Python at FOLDER with the packages of a list. They come before those of build/venv,
# which it finds after them, breccia's entry points among them.
beside_build_venv() {
    local made=$1 list=$2 folder
    rm -rf "$made"
    "${PYTHON:-python3}" -m venv "$made" || return
    "$made/bin/python" -m pip install --quiet --no-deps -r "$list" || return
    folder=$("$made/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
        >"$folder/packages_of_build_venv.pth"
    cp "$list" "$made"
}

# What the tests compare with, beside frameworks.
oracles=(ml_dtypes gfloat safetensors matplotlib onnx)

# bare_python FOLDER PACKAGE...: a Python at FOLDER with NumPy, what runs tests, and these packages at their pinned
# versions. It has no framework, and its bin no compiler.
bare_python() {
    local folder=$1 names
    shift
    names=$(IFS='|' && echo "numpy|pytest|pytest-xdist|hypothesis${1:+|$*}")
    python -m venv --clear "$folder"
    grep -hE "^($names)==" .ci/requirements-{test,peers}.txt >"$folder/requirements.txt"
    "$folder/bin/pip" install --quiet --only-binary :all: -r "$folder/requirements.txt"
}
