# SPDX-License-Identifier: Apache-2.0
"""A format is one value of the bridges' registry: nothing else knows formats by their names."""

import ast
import dataclasses
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia import bridges
from breccia.bridges import NO, FileFormat, Found
from breccia.checkpoint import Checkpoint, SafetensorsFile, convert, save_arrays, verify

PACKAGE = Path(breccia.__file__).parent
REGISTRY = bridges.registry()
MEMBERS = {field.name: str(field.type) for field in dataclasses.fields(FileFormat)}
# What may not know a format by its name. checkpoint/files reads a container, which has the name of a format, too.
CALLERS = [path for path in (PACKAGE / "checkpoint").rglob("*.py") if path.parent.name != "files"]
CALLERS += [*(PACKAGE / "cli").glob("*.py"), PACKAGE / "io.py"]
CALLERS += [PACKAGE / "transformers" / "loading.py"]


def arguments(kind: str) -> int | None:
    """How many a field of that type is called with; None where it is no function."""
    node = ast.parse(kind, mode="eval").body  # Callable[[...], ...], perhaps with | None
    node = node.left if isinstance(node, ast.BinOp) else node
    if not ast.unparse(node).startswith("Callable["):
        return None
    assert isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)
    listed = node.slice.elts[0]
    assert isinstance(listed, ast.List)
    return len(listed.elts)


def test_every_member_of_the_contract_is_described() -> None:
    said = re.findall(r"^ {4}(\w+): ", inspect.getdoc(FileFormat) or "", re.MULTILINE)
    assert said == list(MEMBERS)
    assert bridges.Bridge is FileFormat


@pytest.mark.parametrize("name", REGISTRY)
def test_a_bridge_is_called_as_the_contract_says(name: str) -> None:
    bridge = REGISTRY[name]
    assert bridge.name == name
    for member, kind in MEMBERS.items():
        value, wanted = getattr(bridge, member), arguments(kind)
        assert callable(value) is (wanted is not None and value is not None), member
        if wanted is not None and value is not None:
            inspect.signature(value).bind(*range(wanted))  # raises where it cannot be called so


def test_every_module_of_a_format_is_in_the_list() -> None:
    folder = PACKAGE / "bridges"
    files = [path for path in folder.rglob("*.py") if "\nBRIDGE = " in path.read_text()]
    names = {path.relative_to(folder).with_suffix("").parts[0] for path in files}
    listed = [module.__name__.rpartition(".")[2] for module in bridges.modules().values()]
    assert listed == sorted(names)


WITHOUT_FILES = """
import os, resource, sys
import breccia.bridges as bridges
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
for ask in ("modules()", "registry()", "bridge('plain')", "from_mlx"):
    try:
        eval("bridges." + ask)
    except OSError:
        held.append(None)
for fd in held:
    fd is None or os.close(fd)
assert held.count(None) == 4, "modules were there without files"
assert bridges.modules().keys() == bridges.registry().keys()
bridges.bridge("mlx"), bridges.from_mlx, bridges.registry()
"""


def test_formats_come_when_files_can_be_opened_again() -> None:
    run = subprocess.run([sys.executable, "-c", WITHOUT_FILES], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", REGISTRY)
def test_what_a_bridge_says_fits(name: str) -> None:
    bridge = REGISTRY[name]
    assert all(bridge.carries(recipe) for recipe in bridge.recipes.values())
    assert not bridge.recipes or bridge.writes or not bridge.anchors
    assert bool(bridge.extra) or bridge.peer is None


def _names_of_formats(tree: ast.AST) -> Iterator[str]:
    """Comparisons with, and keyword arguments of, a format's name; modules of bridges that are asked for."""
    for node in ast.walk(tree):
        found: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            found = [node.left, *node.comparators]
        elif (isinstance(node, ast.keyword) and node.arg in ("format", "bridge")) or isinstance(node, ast.MatchValue):
            found = [node.value]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules = {module.__name__ for module in bridges.modules().values()}
            every = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (f"{node.lineno}: {one}" for one in every if one in modules)
        for value in found:
            items = value.elts if isinstance(value, ast.Tuple | ast.List | ast.Set) else [value]
            for item in items:
                if isinstance(item, ast.Constant) and item.value in REGISTRY:
                    yield f"{node.lineno}: {item.value!r}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", REGISTRY)
def test_no_bridge_names_another(name: str) -> None:
    """Neither by comparing with its name or the method that names it, nor by importing it."""
    own = bridges.modules()[name].__name__
    others = {one.__name__ for other, one in bridges.modules().items() if other != name}
    words = {word for other, one in REGISTRY.items() if other != name for word in (other, *getattr(one, "methods", ()))}
    words -= {name, *getattr(REGISTRY[name], "methods", ()), *breccia.recipe_names.names()}  # which are kinds, too
    parts = own.removeprefix("breccia.").split(".")
    home = PACKAGE.joinpath(*parts)
    for path in home.rglob("*.py") if home.is_dir() else [home.with_suffix(".py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                assert not any(node.module == other or node.module.startswith(f"{other}.") for other in others), path
            for value in (node.left, *node.comparators) if isinstance(node, ast.Compare) else ():
                items = value.elts if isinstance(value, ast.Tuple | ast.List | ast.Set) else [value]
                named = {item.value for item in items if isinstance(item, ast.Constant)} & words
                assert not named, f"{path}:{node.lineno}: {named}"


def _guesses(tree: ast.AST) -> Iterator[str]:
    """Questions whether a bridge has a member."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr"):
            asked = ast.unparse(node.args[0])
            if any(word in asked for word in ("bridge", "module")):
                yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.always
@pytest.mark.parametrize("path", CALLERS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_caller_knows_a_format_by_its_name(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert list(_names_of_formats(tree)) == []
    assert list(_guesses(tree)) == []


def test_the_search_finds_what_it_looks_for() -> None:
    questions = ['f == "gguf" or g in ("awq", "x")', 'T(format="mlx")', "from breccia.bridges import gguf"]
    bad = "\n".join([*questions, 'hasattr(module, "x")'])
    assert len(list(_names_of_formats(ast.parse(bad)))) == 4
    assert len(list(_guesses(ast.parse(bad)))) == 1


TOY = '''
"""INT8 with a row's scale, in files that call codes "toy" and scales "size"."""

import numpy as np

import breccia
from breccia.bridges import FileFormat, Found, Part
from breccia.layouts import PerChannel

ROW = breccia.INT8Scaling()


def from_toy(parts, found):
    return breccia.ScaledTensor(parts["toy"].view(np.int8), parts["size"], ROW, PerChannel())


def find(name, entries, context):
    prefix = name.removesuffix("toy")
    if prefix + "size" not in entries:
        return None
    parts = {"toy": name, "size": prefix + "size"}
    return Found(prefix + "weight", "toy", "toy", parts, entries[name].shape, ROW, PerChannel(), "float32")


def lay_out(scaled, place):
    if scaled.recipe != ROW:
        raise ValueError(f"scaled must be {ROW}, got {scaled.recipe}")
    return {
        "toy": Part("I8", scaled.shape, lambda: np.asarray(scaled.data)),
        "size": Part("F32", tuple(scaled.scale.shape), lambda: np.asarray(scaled.scale)),
    }


BRIDGE = FileFormat(
    "toy",
    recipes={"row": ROW},
    anchors=(".toy",),
    find=find,
    read=from_toy,
    carries=lambda recipe: recipe == ROW,
    lay_out=lay_out,
    header=lambda names, recipes, inputs: {"toys": str(len(recipes))},
    config=lambda written: {"quantization_config": {"quant_method": "toy", "left": written.ignored}},
)
'''


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Any]:
    """A format that is one file."""
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    spec = importlib.util.spec_from_file_location("toy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert bridges.bridge("gguf").container.whole  # looked up before: the new one is found all the same
    bridges.register(module.BRIDGE)
    try:
        yield module
    finally:
        bridges.unregister("toy")


def model(path: Path) -> Path:
    path.mkdir()
    values = np.random.default_rng(3).normal(0, 0.1, (64, 96)).astype(np.float32)
    arrays = {"layer.weight": values, "norm.weight": np.ones(96, np.float32)}
    save_arrays(arrays, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps({"model_type": "test"}))
    return path


def test_a_new_format_is_one_file(toy: Any, tmp_path: Path) -> None:
    source = model(tmp_path / "in")
    convert(source, tmp_path / "toy", "toy")
    file = SafetensorsFile(tmp_path / "toy" / "model.safetensors")
    assert set(file.entries) == {"layer.toy", "layer.size", "norm.weight"}
    assert file.metadata["toys"] == "1"
    said = json.loads((tmp_path / "toy" / "config.json").read_text())
    assert said["quantization_config"]["quant_method"] == "toy"
    expected = breccia.cast(SafetensorsFile(source / "model.safetensors")["layer.weight"], toy.ROW)
    with_toy = dict(breccia.open(tmp_path / "toy"))["layer.weight"]
    np.testing.assert_array_equal(with_toy.data, expected.data.view(np.int8))
    np.testing.assert_array_equal(with_toy.scale, expected.scale)
    convert(tmp_path / "toy", tmp_path / "own", "breccia")
    report = convert(tmp_path / "own", tmp_path / "again", "toy:row")
    assert report["tensors"]["repack"] == 1
    again = SafetensorsFile(tmp_path / "again" / "model.safetensors")
    for name in ("layer.toy", "layer.size"):
        np.testing.assert_array_equal(again[name], file[name])
    verify(tmp_path / "toy", source)


@pytest.mark.parametrize("error", [TypeError, KeyError, AttributeError, ValueError])
def test_a_mistake_of_a_format_is_not_taken_for_a_finding(toy: Any, tmp_path: Path, error: type[Exception]) -> None:
    """A ValueError says that a tensor does not fit; anything else is a bug, and must not read as one."""
    convert(model(tmp_path / "in"), tmp_path / "toy", "toy")

    def find(name: str, entries: Any, context: Any) -> Any:
        raise error("toys are broken")

    bridges.unregister("toy")
    bridges.register(dataclasses.replace(toy.BRIDGE, find=find))
    if error is ValueError:
        findings = [finding for found in Checkpoint(tmp_path / "toy").found for finding in found.findings]
        assert findings == ["looks quantized but does not fit: toys are broken"]
    else:
        with pytest.raises(error, match="toys are broken"):
            Checkpoint(tmp_path / "toy")


def test_a_format_leaves_with_its_registration(toy: Any, tmp_path: Path) -> None:
    assert "toy:row" in breccia.checkpoint.target_names()
    assert bridges.bridge("toy") is toy.BRIDGE
    bridges.unregister("toy")
    try:
        assert "toy" not in bridges.registry()
        with pytest.raises(KeyError):
            bridges.bridge("toy")
        with pytest.raises(ValueError, match=r"^to must be a recipe or a format, got 'toy'"):
            convert(model(tmp_path / "in"), tmp_path / "out", "toy")
    finally:
        bridges.register(toy.BRIDGE)


@pytest.mark.parametrize("name", ["", "plain", "Toy", "a:b", " toy"])
def test_a_name_that_nothing_can_spell_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^bridge\.name must be a word in lower case without ':', got "):
        bridges.register(bridges.FileFormat(name))


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match=r"^bridge\.name must be new, there is a format 'gguf'$"):
        bridges.register(bridges.FileFormat("gguf"))


def _of_quark(name: str, entries: Any, context: Any) -> Found:
    weight = name.removesuffix("_scale")
    parts, recipe = {"weight": weight, "weight_scale": name}, breccia.Float8CurrentScaling()
    return Found(weight, "other", "fp8", parts, entries[weight].shape, recipe, recipe.layout, "float32")


def _fp8(path: Path, method: str) -> Path:
    """A checkpoint of names that several formats have; ``method`` is what config.json names."""
    scaled = breccia.cast(np.random.default_rng(3).normal(0, 0.1, (64, 96)).astype(np.float32), "fp8")
    arrays = {"a.weight": np.asarray(scaled.data), "a.weight_scale": np.asarray(scaled.scale)}
    path.mkdir()
    save_arrays(arrays, path / "model.safetensors", dtypes={"a.weight": "F8_E4M3"})
    said = {"quantization_config": {"quant_method": method}} if method else {}
    (path / "config.json").write_text(json.dumps(said))
    return path


@pytest.mark.parametrize("word", ["other", "theirs", "modelopt"])
def test_what_config_json_names_is_asked_first(word: str, tmp_path: Path) -> None:
    methods = () if word == "other" else (word,)
    bridge = FileFormat(
        "other", methods=methods, anchors=("weight_scale",), find=_of_quark, read=lambda parts, found: 1 / 0
    )
    bridges.register(bridge)
    try:
        source = _fp8(tmp_path / "named", word)
        assert [one.format for one in Checkpoint(source).found] == ["other"]
        others = _fp8(tmp_path / "others", "compressed-tensors")
        assert [one.format for one in Checkpoint(others).found] == ["compressed-tensors"]
    finally:
        bridges.unregister("other")


def test_two_that_claim_as_much_are_both_named(tmp_path: Path) -> None:
    bridges.register(FileFormat("other", anchors=("weight_scale",), find=_of_quark))
    try:
        source = _fp8(tmp_path / "in", "")
        [finding] = next(one.findings for one in Checkpoint(source).found if one.name == "a.weight_scale")
        kinds = {"compressed-tensors's fp8", "other's fp8"}
        assert set(finding.removeprefix("looks quantized, like ").partition(":")[0].split(" and ")) == kinds
        with pytest.raises(ValueError, match=r"config\.json must name the method"):
            convert(source, tmp_path / "out", "bf16")
    finally:
        bridges.unregister("other")


def test_who_claims_nothing_is_not_asked(tmp_path: Path) -> None:
    asked: list[str] = []
    never = FileFormat("other", anchors=("weight_scale",), claims=lambda context: NO, find=lambda *a: asked.append(a))
    bridges.register(never)
    try:
        assert [one.format for one in Checkpoint(_fp8(tmp_path / "in", "other")).found] == ["compressed-tensors"]
        assert asked == []
    finally:
        bridges.unregister("other")


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", [name for name, one in REGISTRY.items() if one.recipes and one.anchors])
def test_the_order_of_the_list_decides_nothing(
    name: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model(tmp_path / "in")
    (source / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))  # which knows MXFP4 of that format
    for key in REGISTRY[name].recipes:
        made = tmp_path / key
        convert(source, made, f"{name}:{key}")
        if not named:
            (made / "config.json").write_text("{}")
        found = []
        for turn in (list, reversed):
            monkeypatch.setattr(bridges, "registry", lambda turn=turn: dict(turn(REGISTRY.items())))
            found.append([(one.name, one.format, one.kind, one.findings) for one in Checkpoint(made).found])
        monkeypatch.undo()
        assert found[0] == found[1]
        if named:
            assert {one[1] for one in found[0]} <= {name, "plain"}
