# SPDX-License-Identifier: Apache-2.0
"""The page of `breccia report`: what it shows, that nothing in a file becomes markup, and that it stands alone."""

import html.parser
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia.checkpoint import convert, report, save_arrays, verify
from breccia.checkpoint.judging import template
from breccia.checkpoint.judging.report import gather, in_words
from breccia.moments import Moments, save_moments
from checkpoints import MAKERS, weight
from test_cli import run
from test_verify_screens import BAD, NAMES, pair  # noqa: F401 (a fixture)

VOID = {"meta", "rect", "path"}  # elements without an end


class Page(html.parser.HTMLParser):
    """Elements and texts of a page. Raises AssertionError where an end is not that of the element that is open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(" ".join(data.split()))

    def having(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


def made(pair: tuple[Path, Path], out: Path, **options: Any) -> tuple[dict[str, Any], Page]:  # noqa: F811
    data = report(pair[1], out, pair[0], **options)
    return data, Page(out.read_text(encoding="utf-8"))


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


def test_the_page_shows_what_was_found(pair: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
    data, page = made(pair, tmp_path / "p.html")
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = [attrs["href"] for attrs in page.having("a")]
    assert all(link and link[0] == "#" and link[1:] in ids for link in links)
    assert len(page.having("section")) == 5 + 20  # rooms, map, lost, programs, kinds, and the layers
    assert data["found"] in page.texts
    sqnr = {one["name"]: float(one["sqnr_db"]) for one in verify(*pair)["tensors"]}
    rows = {one["row"]["name"]: one["row"] for layer in data["layers"] for one in layer["tensors"]}
    assert {name: row["sqnr_db"] for name, row in rows.items()} == sqnr
    cells = [attrs for attrs in page.having("td") if "style" in attrs]
    assert len(cells) == len(NAMES)
    assert [attrs["class"] for attrs in cells].count("hot low") == 1
    assert f"{sqnr[BAD]:.1f}" in page.texts
    ranked = sorted((attrs for attrs in page.having("tr") if "data-rank" in attrs), key=lambda a: int(a["data-rank"]))
    assert len(ranked) == len(NAMES)
    (worst,) = (attrs["id"] for attrs in page.having("tr") if attrs.get("class") == "low")
    assert ranked[0]["id"] == worst
    assert any(text.startswith(f"failed: {BAD} (") and "below 12 dB" in text for text in page.texts)


def test_rooms_have_all_bytes(tmp_path: Path) -> None:
    shapes = {"model.embed_tokens": "embeddings", "lm_head": "head", "model.norm": "norms"}
    layer = {
        "self_attn.q_proj": "attention",
        "mlp.up_proj": "mlp",
        "mlp.gate": "experts",
        "q_norm": "norms",
        "LayerNorm": "norms",
    }
    shapes |= {f"model.layers.0.{name}": room for name, room in layer.items()}
    shapes |= {f"model.layers.0.mlp.experts.{i}.down_proj": "experts" for i in range(3)}
    arrays = {f"{name}.weight": weight(64, 64) for name in shapes}
    save_arrays(arrays, tmp_path / "x.safetensors")
    data = gather(tmp_path / "x.safetensors")
    assert {one["room"]: one["count"] for one in data["rooms"]} == Counter(shapes.values())
    assert sum(one["nbytes"] for one in data["rooms"]) == data["model"]["nbytes"] == 64 * 64 * 4 * len(arrays)
    assert sum(one["share"] for one in data["rooms"]) == pytest.approx(1)
    (experts,) = (one for one in data["kinds"] if "experts" in one["kind"])
    assert (experts["kind"], experts["count"]) == ("mlp.experts.*.down_proj.weight", 3)


def test_errors_of_outputs_have_a_map_and_an_order(pair: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
    loud = "model.layers.7.down_proj"
    moments = {
        name.removesuffix(".weight"): Moments(np.full(64, 9.0, np.float32), np.int64(9))
        for name in NAMES
        if name != BAD
    }
    save_moments(moments, tmp_path / "m")
    data, page = made(pair, tmp_path / "p.html", moments=tmp_path / "m")
    assert [one["title"] for one in data["maps"]] == ["SQNR in dB", "Error of the layer's output"]
    assert sum("style" in attrs for attrs in page.having("td")) == 2 * len(NAMES) - 1
    rows = {one["row"]["name"]: one["row"] for layer in data["layers"] for one in layer["tensors"]}
    known = sorted((row for row in rows.values() if row["output_error"] is not None), key=lambda row: row["rank"])
    errors = [row["output_error"] for row in known]
    assert errors == sorted(errors, reverse=True)
    assert 0 < rows[f"{loud}.weight"]["output_error"] < 1


HOSTILE = """</td></script></style><script>alert(1)</script><img src=x onerror='alert(2)'>"&lt;{{ title }}{% end %}"""


@pytest.mark.parametrize("compared", [False, True])
def test_no_name_becomes_markup(compared: bool, tmp_path: Path) -> None:
    """Names of tensors, what config.json and breccia.json hold: the page has the elements and attributes that it has
    of harmless words."""

    def page_of(word: str, folder: Path) -> Page:
        (folder / "<b>in").mkdir(parents=True)
        names = [f"{word}.layers.{i}.{word}.weight" for i in range(2)] + [f"{word}.weight"]
        save_arrays({name: weight(32, 64) for name in names}, folder / "<b>in/model.safetensors")
        (folder / "<b>in/config.json").write_text(json.dumps({"model_type": "x", "architectures": [word]}))
        convert(folder / "<b>in", folder / "<i>out", "mxfp4", include=["*"])
        said = json.loads((folder / "<i>out/breccia.json").read_text())
        said |= {"breccia": word, "to": word, "options": {word: word}, "notes": [word]}
        (folder / "<i>out/breccia.json").write_text(json.dumps(said))
        report(folder / "<i>out", folder / "p.html", folder / "<b>in" if compared else None)
        page = Page((folder / "p.html").read_text(encoding="utf-8"))
        assert " ".join(word.split()) in page.texts  # a note
        assert any(attrs.get("title") == names[0] for _, attrs in page.elements)
        return page

    page, harmless = page_of(HOSTILE, tmp_path / "hostile"), page_of("word", tmp_path / "harmless")
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in harmless.elements]
    assert [list(attrs) for _, attrs in page.elements] == [list(attrs) for _, attrs in harmless.elements]


def test_the_page_stands_alone_and_is_the_same_again(pair: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
    _, page = made(pair, tmp_path / "p.html")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.elements}
    assert not [attrs for _, attrs in page.elements if "src" in attrs or str(attrs.get("href", "#"))[0] != "#"]
    assert not re.search(r"https?:|url\(|@import|fetch\(|XMLHttp|localStorage|eval\(", text)
    assert str(tmp_path) not in text  # no path of this machine
    assert str(pair[0].parent) not in text
    assert "bad.safetensors" in page.texts
    made(pair, tmp_path / "q.html")
    assert (tmp_path / "q.html").read_text(encoding="utf-8") == text


def test_the_command(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    out = tmp_path / "p.html"
    words = ("report", pair[1], "--reference", pair[0], "--html", out)
    code, said, _ = run(*words, capsys=capsys)
    assert code == 0
    assert "40 tensors in 20 sections" in said
    assert "below the bound, median 2" in said
    out.write_text("mine")
    code, _, err = run(*words, capsys=capsys)
    assert (code, out.read_text()) == (2, "mine")
    assert "--html must not be there" in err
    assert "--force replaces it" in err
    _, said, _ = run(*words, "--force", "--json", capsys=capsys)
    assert json.loads(said)["rooms"][0]["room"] == "mlp"
    code, _, err = run("report", pair[1], "--html", tmp_path / "p.png", capsys=capsys)
    assert (code, "--html must end in .html" in err) == (2, True)
    code, _, err = run("report", pair[1], "--moments", out, "--html", tmp_path / "r.html", capsys=capsys)
    assert (code, "--moments must be left out without a reference" in err) == (2, True)
    save_arrays({"other.weight": weight(32, 64)}, tmp_path / "other.safetensors")
    again = ("report", pair[1], "--reference", tmp_path / "other.safetensors", "--html", tmp_path / "r.html")
    code, _, err = run(*again, capsys=capsys)
    assert (code, "--reference must have tensors of" in err) == (2, True)
    assert not (tmp_path / "r.html").exists()


def test_a_manifest_of_odd_words(tmp_path: Path) -> None:
    """breccia.json of anybody: words of other types are left out."""
    folder = tmp_path / "in"
    folder.mkdir()
    save_arrays({"a.0.weight": weight(32, 64)}, folder / "model.safetensors")
    for odd in (5, "words", {"a": 1}, None, [1, None]):
        said = {"files": {}, "breccia": odd, "to": odd, "options": odd, "notes": odd}
        (folder / "breccia.json").write_text(json.dumps(said))
        (folder / "config.json").write_text(json.dumps({"architectures": odd, "model_type": odd}))
        data = report(folder, tmp_path / "p.html", force=True)
        Page((tmp_path / "p.html").read_text(encoding="utf-8"))
        assert data["lost"] == (["1", "None"] if isinstance(odd, list) else [])


@pytest.mark.parametrize("maker", MAKERS)
def test_every_folder_has_a_page(maker: str, tmp_path: Path) -> None:
    path = MAKERS[maker](tmp_path / "in")
    data = report(path, tmp_path / "p.html")
    Page((tmp_path / "p.html").read_text(encoding="utf-8"))
    assert data["programs"] or data["readers"] or data["model"]["formats"]
    assert sum(one["count"] for one in data["kinds"]) == data["model"]["tensors"]


@pytest.mark.parametrize("kind", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0"])
def test_a_page_has_scales_of_every_type_of_gguf(kind: str, tmp_path: Path) -> None:
    """K-quants are read as values; their scales are in the file all the same."""
    save_arrays({"layers.0.weight": weight(32, 512)}, tmp_path / "x.safetensors")
    convert(tmp_path / "x.safetensors", tmp_path / "x.gguf", f"gguf:{kind}")
    (layer,) = gather(tmp_path / "x.gguf")["layers"]
    scales = layer["tensors"][0]["row"]["scales"]
    runs = 32 * 512 // (32 if kind in ("q4_k", "q5_k", "q8_0") else 16)
    assert 0.9 * runs < sum(scales["counts"]) <= runs
    assert sum(scales["counts"]) + scales["zeros"] == runs
    assert -20 < scales["low"] < scales["high"] < 2


def test_notes_of_a_conversion_are_on_its_page(tmp_path: Path) -> None:
    save_arrays({"a.0.weight": weight(32, 64), "b.0.weight": weight(32, 60)}, tmp_path / "x.safetensors")
    folder = tmp_path / "in"
    folder.mkdir()
    (tmp_path / "x.safetensors").rename(folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    notes = convert(folder, tmp_path / "out", "compressed-tensors:nvfp4")["notes"]
    assert any("b.0.weight" in note for note in notes)
    assert gather(tmp_path / "out")["lost"] == notes


_DOCUMENT = """
const listeners = {}, shown = {textContent: ""}, given = JSON.parse(ranks).map(([rank, title]) => ({
  dataset: {rank}, classes: new Set(), querySelector: () => ({title}), scrollIntoView() {},
}));
for (const row of given) row.classList = {add: name => row.classes.add(name), remove: name => row.classes.delete(name)};
const buttons = {where: shown, next: {}, before: {}};
for (const name of ["next", "before"]) buttons[name].addEventListener = (_, call) => { buttons[name].click = call; };
const document = {
  querySelectorAll: () => given, getElementById: name => buttons[name],
  addEventListener: (name, call) => { listeners[name] = call; },
};
const here = () => JSON.stringify(given.filter(row => row.classes.has("here")).map(row => row.dataset.rank));
"""


def test_keys_go_from_the_worst_to_the_best(pair: tuple[Path, Path], tmp_path: Path) -> None:  # noqa: F811
    """The page's own script, over its own rows."""
    quickjs = pytest.importorskip("quickjs")
    _, page = made(pair, tmp_path / "p.html")
    ranks = [str(attrs["data-rank"]) for attrs in page.having("tr") if "data-rank" in attrs]
    (script,) = re.findall("<script>(.*?)</script>", (tmp_path / "p.html").read_text(encoding="utf-8"), re.S)
    engine = quickjs.Context()
    engine.set("ranks", json.dumps([[rank, f"tensor {rank}"] for rank in ranks]))
    engine.eval(_DOCUMENT + script)

    def pressed(key: str) -> tuple[list[str], str]:
        engine.eval(f"listeners.keydown({{key: {json.dumps(key)}}})")
        return json.loads(engine.eval("here()")), engine.eval("shown.textContent")

    assert pressed("n") == (["0"], "1 of 40: tensor 0")
    assert pressed("n") == (["1"], "2 of 40: tensor 1")
    assert pressed("x") == (["1"], "2 of 40: tensor 1")
    assert pressed("p") == pressed("p") == (["0"], "1 of 40: tensor 0")
    engine.eval("buttons.next.click()")
    assert json.loads(engine.eval("here()")) == ["1"]


def test_a_template_has_loops_choices_and_files(tmp_path: Path) -> None:
    (tmp_path / "x.css").write_text("a > b {{ no }}")
    (tmp_path / "t.html").write_text(
        "{% file x.css %}|{% for one in some %}{% if one.on %}{{ one.n | twice }}{% else %}-{% end %},{% end %}"
        "{{ one }}"
    )
    some = [{"on": True, "n": "<"}, {"on": False, "n": 1}]
    text = template.render(tmp_path / "t.html", {"some": some, "one": "'&"}, {"twice": lambda x: x * 2})
    assert text == "a > b {{ no }}|&lt;&lt;,-,&#x27;&amp;"
