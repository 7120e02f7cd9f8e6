# SPDX-License-Identifier: Apache-2.0
"""What `breccia verify` and `breccia plot` print and draw: alike layers folded, the summary last, outliers named."""

import json
import re
from pathlib import Path
from typing import Any

import breccia
import numpy as np
import pytest
from breccia.checkpoint import convert, save_arrays, verify
from breccia.checkpoint.judging.plot import in_words, measure, plot
from breccia.checkpoint.judging.verify_lines import render
from checkpoints import weight
from test_cli import run

NAMES = [f"model.layers.{i}.{name}.weight" for i in range(20) for name in ("q_proj", "down_proj")]
BAD = "model.layers.3.q_proj.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and one made of it of which a layer is wrong."""
    folder = tmp_path_factory.mktemp("pair")
    arrays: dict[str, Any] = {name: weight(32, 64) for name in NAMES}
    save_arrays(arrays, folder / "good.safetensors")
    save_arrays({**arrays, BAD: arrays[BAD] + weight(32, 64)[::-1]}, folder / "other.safetensors")
    convert(folder / "other.safetensors", folder / "bad.safetensors", "nvfp4")
    return folder / "good.safetensors", folder / "bad.safetensors"


def test_layers_that_are_alike_share_a_line(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, said, _ = run("verify", *pair, capsys=capsys)
    lines = said.splitlines()
    assert code == 1
    assert max(map(len, lines)) <= 80
    assert lines[0].split() == ["count", "SQNR", "dB", "cosine", "max", "error", "tensor"]
    assert [line.split()[0] for line in lines[1:4]] == ["1", "20", "19"] or [
        line.split()[0] for line in lines[1:4]
    ] == ["1", "19", "20"]
    assert BAD in lines[1]  # the worst first, alone: it failed, the others did not
    assert {line.split()[-1] for line in lines[2:4]} == {
        "model.layers.*.q_proj.weight",
        "model.layers.*.down_proj.weight",
    }
    report = verify(*pair)
    of_group = [float(t["sqnr_db"]) for t in report["tensors"] if "down" in t["name"]]
    (line,) = (line for line in lines if line.endswith("layers.*.down_proj.weight"))
    assert float(line.split()[1]) == pytest.approx(min(of_group), abs=6e-3)
    assert "lowest" in lines[-3]
    assert BAD in said.split("found: median")[1]
    assert lines[-2] == "lowest SQNR allowed: 12 dB; 1 below"
    assert lines[-1].startswith("not ok")
    assert re.search(rf"! failed: {re.escape(BAD)}\s+\(-?\d+\.\d\d dB, below 12 dB", said.replace("\n", " "))


def test_all_has_a_line_for_each(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, said, _ = run("verify", *pair, "--all", capsys=capsys)
    rows = [line for line in said.splitlines() if re.match(r" +1 +-?[\d.]+ ", line)]
    assert len(rows) == len(NAMES)
    assert sorted(rows, key=lambda line: float(line.split()[1])) == rows


def test_many_failures_are_not_a_wall(pair: tuple[Path, Path]) -> None:
    report = verify(*pair, min_sqnr_db=90)
    text = render(report)
    assert text.count("! failed") == 12
    assert "! and 28 more, which --json has" in text
    assert "; 40 below" in text


def test_a_likely_mistake_stands_beside_the_name(tmp_path: Path) -> None:
    w = weight(64, 64)
    save_arrays({"a.0.weight": w}, tmp_path / "a.safetensors")
    q = breccia.cast(w, "mxfp4")
    data = np.asarray(q.data)
    swapped = breccia.ScaledTensor((data >> 4) | (data << 4), q.scale, q.recipe, q.layout, shape=q.shape)
    breccia.save({"a.0.weight": swapped}, tmp_path / "b.safetensors")
    report = verify(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    (mistake,) = (t["mistake"] for t in report["tensors"])
    assert "nibbles" in mistake
    assert f"below 12 dB: {mistake}?)" in " ".join(render(report).split())


def row(name: str, db: float | None, bound: float = 12.0) -> dict[str, Any]:
    return {"name": name, "format": "breccia nvfp4", "sqnr_db": db, "bound_db": bound}


def test_outliers_in_words() -> None:
    alike = [row(f"l{i}", 20 + i / 100) for i in range(20)]
    assert in_words(alike) == "median 20.1 dB, lowest 20.0 dB: none is below its bound or far from the others"
    far = [*alike, row("x", 15.0), row("y", 16.0)]
    assert in_words(far) == "far below the others, median 20.1 dB: x 15.0 dB, y 16.0 dB"
    below = [*far, *(row(f"z{i}", float(i)) for i in range(5))]
    assert in_words(below).startswith("below the bound, median 20.")
    assert in_words(below).endswith(": z0 0.0 dB, z1 1.0 dB, z2 2.0 dB and 2 more")
    assert in_words([row("a", None)]) == ""
    assert in_words([row("a", float("inf")), row("b", float("nan"))]) == ""


@pytest.mark.parametrize("kind", ["html", "svg"])
def test_a_picture_says_what_it_found(
    kind: str, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / f"p.{kind}"
    code, said, _ = run("plot", pair[1], "--reference", pair[0], "--out", out, capsys=capsys)
    assert code == 0
    assert "below the bound, median 2" in said
    assert BAD in said
    text = out.read_text()
    assert str(tmp_path) not in text  # no path of this machine
    assert str(pair[0].parent) not in text
    assert "bad.safetensors against good.safetensors" in text
    assert "red: the lowest SQNR allowed" in text
    names = re.findall(r">((?:model\.)?layers\.\d+\.\w+\.weight|…[\w.]+)<", text)
    assert names.index(BAD) == 0  # the worst is first
    if kind == "html":
        assert text.count('<tr class="low">') == 1
        assert text.count("<tr") == 1 + len(NAMES)
        assert not re.search(r"""(src|href)=.?(https?:)?//|@import|fetch\(""", text)  # no network
    code, said, _ = run("plot", pair[1], "--reference", pair[0], "--out", out, "--force", "--json", capsys=capsys)
    said_json = json.loads(said)
    assert said_json["found"].startswith("below the bound")
    assert {one["bound_db"] for one in said_json["tensors"]} == {12}


@pytest.mark.parametrize("kind", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0"])
def test_a_picture_has_scales_of_every_type_of_gguf(kind: str, tmp_path: Path) -> None:
    """K-quants are read as values; their scales are in the file all the same."""
    save_arrays({"layers.0.weight": weight(32, 512)}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "x.gguf", f"gguf:{kind}")
    (row,) = measure(tmp_path / "x.gguf")
    runs = 32 * 512 // (32 if kind in ("q4_k", "q5_k", "q8_0") else 16)
    assert 0.9 * runs < sum(row["scales"]) <= runs
    assert sum(row["scales"]) + row["zeros"] == runs
    assert -20 < row["low"] < row["high"] < 2


_PAGE = r"""
// The engine has no locales: digits are compared as a browser does that is asked for "numeric".
const key = (text, options) => options.numeric ? text.replace(/\d+/g, digits => digits.padStart(9, "0")) : text;
String.prototype.localeCompare = function (other, locale, options) {
  const one = key(String(this), options), two = key(other, options);
  return one < two ? -1 : one > two ? 1 : 0;
};
const texts = JSON.parse(table), heads = texts[0].map(text => ({dataset: {}}));
const body = {rows: texts.map(row => ({cells: row.map(text => ({textContent: text}))}))};
body.append = (...moved) => { body.rows = [...body.rows.filter(row => !moved.includes(row)), ...moved]; };
for (const head of heads) head.closest = () => body;
const document = {querySelectorAll: () => heads};
const shown = column => JSON.stringify(body.rows.slice(1).map(row => row.cells[column].textContent));
"""


def test_a_click_on_a_head_sorts_the_page(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The page's own script, over its own table: numbers as numbers, names with numbers in them likewise; a second
    click turns the order around."""
    pytest.importorskip("matplotlib")
    quickjs = pytest.importorskip("quickjs")
    plot(pair[1], tmp_path / "p.html", pair[0])
    page = (tmp_path / "p.html").read_text()
    table = [re.findall("<t[hd]>(.*?)</t[hd]>", row) for row in re.findall("<tr.*?>(.*?)</tr>", page)]
    assert len(table) == 1 + len(NAMES)
    table[5][2], table[9][2] = "inf", ""  # of layers that are equal, and of some that the reference has not
    engine = quickjs.Context()
    engine.set("table", json.dumps(table))
    (script,) = re.findall("<script>(.*?)</script>", page, re.S)
    # What a script declares at its top is seen by the next one in a browser, and here.
    engine.eval(_PAGE + script)

    def clicked(column: int) -> list[str]:
        return list(json.loads(engine.eval(f"heads[{column}].onclick(); shown({column})")))

    names = sorted(NAMES, key=lambda name: (int(name.split(".")[2]), name))
    assert clicked(0) == names
    assert clicked(0) == names[::-1]
    numbers = sorted(float(row[2]) for row in table[1:] if row[2] not in ("", "inf"))
    assert numbers[0] < 12 < numbers[1]
    assert clicked(2) == ["", *(f"{number:.2f}" for number in numbers), "inf"]
    assert clicked(2)[-1] == ""
    assert "tr:hover" in page
