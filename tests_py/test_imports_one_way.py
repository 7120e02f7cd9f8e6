# SPDX-License-Identifier: Apache-2.0
"""Imports of the package go one way: no circle, and none from a lower layer to a higher one.

Imports inside functions count like those at the top, for a circle is one whenever it closes; those for type checkers
alone do not. What a registry loads by name (the modules of frameworks and bridges) it does not import.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from archive import needs_documents

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python/breccia"

# From the lowest to the highest, as docs/design/architecture.md has them. A name stands for a module and what is inside
# of it, unless a longer one does; a package and "=" for its own file alone.
LAYERS = {
    "facts": (
        "_core _moved _version layouts recipes recipe_names formats peers spelling "
        "value= value.form value.inputs verbs.cast_options screen "
        "schemes.inputs schemes.matching schemes.rules schemes.toml "
        "schemes.value"
    ),
    "registry": "frameworks= kernels.triton=",
    "value": ("value.slicing value.sixes value.arrays value.display scaled_tensor kernels.whole_array"),
    "verbs": "verbs value.joining delayed autograd kernels comparison",
    "arrays": "frameworks kernels.triton device",
    "models": "nn optim verbs.quantize_model distributed sharding",
    "stored bytes": (
        "checkpoint.arguments checkpoint.files.bounded_json checkpoint.files.disk checkpoint.files.dtypes "
        "checkpoint.files.input_file checkpoint.files.locks checkpoint.files.planned_file "
        "checkpoint.files.safetensors_file checkpoint.files.safetensors_header checkpoint.files.sums moments "
        "calibration.error_feedback"
    ),
    "bridges": "bridges dlpack schemes",
    "checkpoints": "checkpoint gguf io",
    "programs": (
        "distributed.checkpoints distributed.engine_weights "
        "calibration evaluation testing _serving diffusers peft sglang transformers vllm cli __main__ ="
    ),
}
LEVELS = {name: level for level, names in enumerate(LAYERS.values()) for name in names.split()}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix("."): path
    for path in PACKAGE.rglob("*.py")
}


def imported(module: str, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The modules of this package that a statement imports, as paths below it; "" is the package itself."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    else:
        assert not node.level, f"breccia.{module}: imports are absolute"
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        if name.partition(".")[0] != "breccia":
            continue
        path = name.partition(".")[2]
        while path not in MODULES and path != "_core":
            path = path.rpartition(".")[0]
        yield path


def imports(module: str) -> set[str]:
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                found.update(imported(module, child))
            elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                for other in child.orelse:
                    visit(other)
            else:
                visit(child)

    visit(ast.parse(MODULES[module].read_text(encoding="utf-8")))
    return found - {module}


@functools.cache
def all_imports() -> dict[str, set[str]]:
    """What each module imports; when a test asks for it, since every process of a run collects this file."""
    return {module: imports(module) for module in MODULES} | {"_core": set()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, in order; none where there is no circle."""
    done: set[str] = set()

    def walk(module: str, above: list[str]) -> list[str]:
        if module in above:
            return [*above[above.index(module) :], module]
        if module in done:
            return []
        for other in sorted(graph[module]):
            if found := walk(other, [*above, module]):
                return found
        done.add(module)
        return []

    return next((found for module in graph if (found := walk(module, []))), [])


def level(module: str) -> int:
    """The layer of a module: that of the longest name that it begins with."""
    if f"{module}=" in LEVELS:
        return LEVELS[f"{module}="]
    while module not in LEVELS:
        assert module, "every module must be in a layer"
        module = module.rpartition(".")[0]
    return LEVELS[module]


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    graph = all_imports()
    assert "value.form" in graph["scaled_tensor"] and "checkpoint" in graph["io"]  # at the top, and in a function
    assert "scaled_tensor" not in graph["frameworks"]  # for type checkers alone


def test_there_is_no_circle():
    found = circle(all_imports())
    assert not found, " imports ".join(found)


def test_nobody_but_layouts_asks_of_what_class_a_layout_is():
    """`Layout.block` says it of all four."""
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if module != "layouts" and isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                classes = ast.unparse(node.args[1])
                assert not {"PerTensor", "PerChannel", "PerBlockK", "PerBlockMN"} & set(re.findall(r"\w+", classes))


def test_imports_go_down():
    for module, others in all_imports().items():
        up = [other for other in sorted(others) if level(other) > level(module)]
        assert not up, f"breccia.{module} must not import {', '.join(up)}, which are in a layer above it"


def test_every_layer_is_of_modules_that_exist():
    for name in LEVELS:
        assert name == "_core" or name.removesuffix("=") in MODULES, name


@needs_documents
def test_the_architecture_page_has_the_layers():
    page = (ROOT / "docs/design/architecture.md").read_text(encoding="utf-8")
    table = page.split("## Layers")[1].split("\n## ")[0]
    said = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:]
    assert said == list(LAYERS)
