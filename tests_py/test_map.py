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


def headers_of(path):
    """The headers of src/ that a file includes, and those that these include."""
    seen, left = set(), [path]
    while left:
        names = re.findall(r'^#include "([\w/.]+)"', left.pop().read_text(encoding="utf-8"), re.M)
        found = {ROOT / "cpp/src" / name for name in names if (ROOT / "cpp/src" / name).exists()} - seen
        seen |= found
        left += found
    return seen


def host_files(path):
    """The verb of products, the table of paths, a path and the files whose headers these include, on every floor."""
    matmul = ROOT / "cpp/src/matmul"
    own = [matmul / "matmul.cpp", matmul / "choose.cpp", path]
    headers = set().union(*map(headers_of, own))
    return {*own, *(file for file in (header.with_suffix(".cpp") for header in headers) if file.exists())}


def test_a_product_passes_few_files():
    """Some serve one kind of operand alone: prepared weights, or activations that are codes."""
    paths = sorted((ROOT / "cpp/src/matmul/paths").glob("*.cpp"))
    assert len(paths) == 9
    for path in paths:
        files = host_files(path)
        assert len(files) <= 8, (path, sorted(file.name for file in files))
        assert len([file for file in files if "matmul" in file.parts]) <= 5, path
        floors = {file.parent.name for file in files}
        assert {"matmul", "paths"} < floors <= {"matmul", "paths", "tensor", "runtime"}, path


def test_a_scale_rule_is_written_in_two_files():
    """Besides the catalogue, which chooses among the rules for its recipes."""
    files = [*(ROOT / "cpp").rglob("*.?pp"), *(ROOT / "python/src").rglob("*.?pp")]
    naming = {path.name for path in files if "ScaleRule::" in path.read_text(encoding="utf-8")}
    assert naming == {"recipe.hpp", "scale_rules.inl.hpp", "catalogue.cpp"}


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


def unit_sources(backend):
    """What the units of a backend are compiled of: every file that they include, under cpp/src."""
    src = ROOT / "cpp/src"
    text = (ROOT / "cpp/cmake/backends.cmake").read_text(encoding="utf-8")
    sets = {name: units.split() for name, units in re.findall(r"set\(units_of_(\w+) ?([^)]*)\)", text)}
    shared = [name for unit in sets[backend] for name in (sets[unit[11:-1]] if unit.startswith("${") else [unit])]
    target = (src / f"backends/{backend}/target.hpp").read_text(encoding="utf-8")
    named = dict(re.findall(r'#define (\w+) "([\w/.]+hpp)"', target))  # by which a unit includes what a CPU has
    seen = set()
    left = [f"backends/{unit}.cpp" for unit in shared]
    left += [f"backends/{backend}/{path.name}" for path in (src / f"backends/{backend}").glob("*.cpp")]
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        included = re.findall(r"^ *#include +(\S+)", (src / path).read_text(encoding="utf-8"), re.M)
        names = [name.strip('"') if name.startswith('"') else named.get(name) for name in included]
        own = {name: f"backends/{backend}/{name}" for name in ("vec.hpp", "target.hpp")}
        left += [own.get(name, name) for name in names if name and (src / own.get(name, name)).exists()]
    return seen


@needs_documents
def test_kernels_are_written_where_the_tables_say():
    """Each file in a column is one that a backend of the column is compiled of, and each backend whose rules name a
    kernel is compiled of one that the kernel's cell names."""
    rules = {(backend, kernel) for backend, *_, kernel, _ in breccia._core.matmul_rules()}
    sources = {backend: unit_sources(backend) for backend, _ in rules}
    sources["amx"] |= sources["avx512_bf16"]  # whose table it takes, but for what is its own
    seen = set()
    for table in re.findall(r"^\| .*portable, avx2.*\n\|.*\n((?:\|.*\n)+)", MAP.split("## Operation")[1], re.M):
        headers = MAP[: MAP.index(table)].splitlines()[-2].split("|")[2:-1]
        for row in table.splitlines():
            kernels, *places = row.split("|")[1:-1]
            for header, place in zip(headers, places, strict=True):
                backends = set(header.strip().split(", "))
                files = [path.removeprefix("src/") for path in re.findall(r"`(src/[\w/.]+)`", place)]
                for path in files:
                    assert any(path in sources[backend] for backend in backends), (path, header)
                for name in re.findall(r"\*(\w+)\*", kernels):
                    for backend in backends & {b for b, kernel in rules if kernel == name}:
                        seen.add((backend, name))
                        assert sources[backend] & set(files), (backend, name)
    assert seen == rules


@needs_documents
def test_a_scale_rule_is_named_where_the_map_says():
    """Beside recipes, which choose one: in the enumeration with its traits, and where its arithmetic is."""
    naming = {
        path.relative_to(ROOT / "cpp").as_posix()
        for folder in ("include", "src")
        for path in (ROOT / "cpp" / folder).rglob("*.?pp")
        if "ScaleRule::" in path.read_text(encoding="utf-8")
    }
    places = {"include/breccia/recipe.hpp", "src/kernels/scale_rules.inl.hpp"}
    assert naming == {*places, "src/tensor/catalogue.cpp"}
    row = next(line for line in MAP.splitlines() if line.startswith("| see or add a scale rule"))
    assert all(f"`{place}`" in row for place in places)


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
