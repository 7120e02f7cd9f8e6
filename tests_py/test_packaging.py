# SPDX-License-Identifier: Apache-2.0
"""What a release would forget."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import breccia
import pytest

ROOT = Path(__file__).parent.parent
VERSIONS = {
    "pyproject.toml": r'^version = "(.*)"',
    "python/breccia/_version.py": r'^__version__ = "(.*)"',
    "CMakeLists.txt": r"^project\(breccia VERSION (\S+)",
    "CITATION.cff": r"^version: (.*)",
    "CHANGELOG.md": r"^## (\d[\d.]*)$",  # the newest that is released
    "cpp/packaging/vcpkg/breccia/vcpkg.json": r'^  "version": "(.*)"',
    "cpp/packaging/conda/recipe.yaml": r'^  version: "(.*)"',
}


def found(path: Path, pattern: str) -> list[str]:
    if not path.exists():  # a source archive has less than the repository
        pytest.skip(f"there is no {path.name}")
    return re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", VERSIONS)
def test_one_version(name: str) -> None:
    assert found(ROOT / name, VERSIONS[name])[0] == breccia.__version__


@pytest.mark.parametrize(
    "name",
    [
        "docs/cpp.md",
        "examples/cpp/CMakeLists.txt",
        "cpp/packaging/conan/test_package/CMakeLists.txt",
        "tests_cpp/consumer/find_package/CMakeLists.txt",
        "tests_cpp/consumer/static_export/CMakeLists.txt",
    ],
)
def test_consumers_ask_for_this_version(name: str) -> None:
    """A package of another minor version does not fit."""
    assert found(ROOT / name, r"find_package\(breccia (\S+)") == [breccia.__version__.rpartition(".")[0]]


@pytest.mark.parametrize(
    "name", ["examples/cpp", "cpp/packaging/conan/test_package", "tests_cpp/consumer/find_package"]
)
def test_consumers_find_their_sources(name: str) -> None:
    sources = found(ROOT / name / "CMakeLists.txt", r"add_executable\(\S+ ([^)$]+)\)")
    assert sources or name == "examples/cpp"
    for path in " ".join(sources).split():
        assert (ROOT / name / path).is_file(), path


def test_the_core_is_in_the_namespace_of_this_version() -> None:
    """A file that opens namespace breccia without it would declare a second function of the same name."""
    version = breccia.__version__.rpartition(".")[0].replace(".", "_")
    for path in sorted(ROOT.glob("cpp/**/*.[hc]pp")):
        opened = found(path, r"^namespace breccia\b(.*)")
        assert all(rest.startswith(f"::inline v{version}") for rest in opened), path


def extras_named() -> Iterator[tuple[str, str]]:
    """(where, extra) of what code and documents tell people to install."""
    for path in sorted((ROOT / "python/breccia").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = None
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("require", "require_version"):
                named = node.args[1]
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXTRA":
                named = node.value
            if isinstance(named, ast.Constant) and named.value:
                yield path.name, named.value
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for path in [*documents, *(ROOT / "python").rglob("*.py"), *(ROOT / "examples").glob("*.py")]:
        for extras in re.findall(r"breccia\[([\w,-]+)\]", path.read_text(encoding="utf-8") if path.exists() else ""):
            yield from ((path.name, extra) for extra in extras.split(","))


def test_every_extra_that_is_named_exists() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    named = set(extras_named())
    assert {"onnx", "torchao", "te", "gguf", "transformers", "diffusers"} <= {extra for _, extra in named}
    assert not {(where, extra) for where, extra in named if extra not in extras}
    # An extra of extras names those that there are.
    of_others = {part for group in extras.values() for one in group for part in re.findall(r"breccia\[(.*)\]", one)}
    assert {extra for part in of_others for extra in part.split(",")} <= set(extras)


def test_an_extra_brings_what_is_asked_for() -> None:
    """`require(module, extra)`: the extra installs the distribution that has the module."""
    tomllib = pytest.importorskip("tomllib")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = set()
    for path in sorted((ROOT / "python/breccia").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = [
            ast.literal_eval(n.value)
            for n in tree.body
            if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "EXTRA"
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("require", "require_version"):
                module, extra = node.args
                if isinstance(module, ast.Constant):
                    asked.add(
                        (module.value.partition(".")[0], extra.value if isinstance(extra, ast.Constant) else own[0])
                    )
    assert ("onnx", "onnx") in asked
    for module, extra in asked:
        installed = {re.split(r"[<>=\[]", one)[0].replace("-", "_") for one in extras[extra]}
        assert module in installed, (module, extra)
