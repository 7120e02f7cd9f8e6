# SPDX-License-Identifier: Apache-2.0
"""cpp/README.md is the map of the core: what it names exists, and what exists it names."""

import re
from pathlib import Path

import breccia._core
import breccia.verbs
from archive import needs_documents

ROOT = Path(__file__).parent.parent
MAP = (ROOT / "cpp/README.md").read_text(encoding="utf-8")
ENDINGS = (".hpp", ".cpp", ".inl.hpp")


def folders():
    """Each folder of the map's tree, and the names that stand after it."""
    tree = re.sub(r"\n {29}", " ", MAP.split("## Map")[1].split("```")[1])  # lines that go on
    above = []
    for line in tree.strip("\n").splitlines():
        folder, names = line.split("\u2014")[0].split(maxsplit=1)
        depth = (len(line) - len(line.lstrip())) // 2
        above = [*above[:depth], folder]
        yield ROOT / "cpp" / "".join(above), set(names.split())


@needs_documents
def test_every_path_in_the_text_exists():
    named = re.findall(r"`((?:include|src|python|tests_cpp|benchmarks|docs|examples)/[^`\s]*)`", MAP)
    assert len(named) > 20
    for path in named:
        for cpu in ("portable", "avx2", "avx512", "neon") if "<cpu>" in path else ("",):
            here = path.replace("<cpu>", cpu)
            assert (ROOT / "cpp" / here).exists() or (ROOT / here).exists(), path


def test_the_tree_is_that_of_the_folders():
    seen = list(folders())
    assert len(seen) > 8
    for folder, names in seen:
        files = {path.name.split(".")[0] for path in folder.iterdir() if path.name.endswith(ENDINGS)}
        inside = {f"{path.name}/" for path in folder.iterdir() if path.is_dir()}
        assert names == files | inside, folder


def test_no_include_runs_up():
    """A folder of src includes those that stand after it in the map; kernels and backends, of these, the contract."""
    tree = re.search(r"^src/ +(.*)$", MAP, re.M)[1].replace("/", "").split()
    verbs, kernels = tree[: tree.index("contract") + 1], tree[tree.index("contract") + 1 :]
    may_include = {folder: {*verbs[i:], "breccia"} for i, folder in enumerate(verbs)}
    may_include["matmul"].discard("quantize")
    may_include |= {folder: {*kernels, "contract", "breccia"} for folder in kernels}
    seen = set()
    for path in (ROOT / "cpp/src").rglob("*.?pp"):
        folder = path.relative_to(ROOT / "cpp/src").parts[0]
        includes = re.findall(r'^#include "(\w+)/', path.read_text(encoding="utf-8"), re.M)
        seen |= {(folder, other) for other in includes}
        assert set(includes) <= may_include[folder], path
    assert {("runtime", "contract"), ("tensor", "runtime"), ("matmul", "tensor"), ("backends", "kernels")} <= seen


def test_kernels_stand_under_the_backends_that_choose_them():
    """The table of products names a place for each kernel that a backend's rules name, and for no other."""
    table = MAP.split("| kernel | ")[1].split("\n\n")[0].splitlines()
    columns = [cell.strip().split(", ") for cell in table[0].split("|")[:2]]
    written = set()
    for row in table[2:]:
        kernels, *places = row.split("|")[1:-1]
        for name in re.findall(r"\*(\w+)\*", kernels):
            written |= {(name, i) for i, place in enumerate(places) if place.strip()}
    rules = breccia._core.matmul_rules()
    assert written == {(kernel, i) for backend, *_, kernel, _ in rules for i in (0, 1) if backend in columns[i]}
    assert {backend for backend, *_ in rules} == {backend for column in columns for backend in column}


@needs_documents
def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", MAP):
        assert (ROOT / "cpp" / target).exists(), target


def test_the_verbs_are_the_same_in_every_language():
    """In C++ each has two forms, one that allocates and one that does not; in C the latter."""
    verbs = set(breccia.verbs.__all__)
    more = verbs | set(breccia.verbs.grouped.__all__)
    include = ROOT / "cpp/include/breccia"
    cpp = (include / "ops.hpp").read_text(encoding="utf-8")
    assert set(re.findall(r"^BRECCIA_API void (\w+)_into\(", cpp, re.M)) == more
    assert set(re.findall(r"^BRECCIA_API (?:ScaledTensor|Array) (\w+)\(", cpp, re.M)) == more
    c = set(re.findall(r"^BRECCIA_C_API breccia_status breccia_(\w+)\(", (include / "breccia.h").read_text(), re.M))
    assert c - {"recipe_new", "part_sizes", "prepare", "set_threads", "shutdown"} == more


@needs_documents
def test_the_page_names_what_each_language_calls_a_verb():
    include = ROOT / "cpp/include/breccia"
    cpp = "".join(header.read_text(encoding="utf-8") for header in include.glob("*.hpp"))
    c = (include / "breccia.h").read_text(encoding="utf-8")
    table = re.search(r"^\| verb \|.*\n\|.*\n((?:\|.*\n)+)", (ROOT / "docs/cpp.md").read_text(encoding="utf-8"), re.M)
    rows = [[re.findall(r"`(\w+)`", cell) for cell in row.split("|")[2:5]] for row in table[1].splitlines()]
    for in_cpp, in_c, in_python in rows:
        assert all(re.search(rf"^(?:BRECCIA_API .*\b{name}\(|class BRECCIA_API {name} )", cpp, re.M) for name in in_cpp)
        assert all(re.search(rf"^BRECCIA_C_API .*\b{name}\(", c, re.M) for name in in_c)
        assert all(callable(getattr(breccia, name)) for name in in_python)
        assert in_cpp
    named = {name for _, in_c, _ in rows for name in in_c}
    others = {"breccia_recipe_new", "breccia_part_sizes"}
    assert named == set(re.findall(r"^BRECCIA_C_API breccia_status (\w+)\(", c, re.M)) - others
