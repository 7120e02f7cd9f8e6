# SPDX-License-Identifier: Apache-2.0
"""``breccia verify --complete``: whole checkpoints pass; what is missing or was never written is found."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from breccia.checkpoint import SafetensorsFile, complete, convert, save_arrays
from breccia.cli import main
from checkpoints import MAKERS, weight, write_shards

LAYERS = 3
TARGETS = ("compressed-tensors:nvfp4", "compressed-tensors:int4", "modelopt:nvfp4", "deepseek", "gptq", "awq", "mlx")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
    arrays = {f"model.layers.{i}.{n}.weight": weight(128, 256) + i for i in range(LAYERS) for n in names}
    return write_shards(tmp_path_factory.mktemp("model") / "in", [arrays], {"num_hidden_layers": LAYERS})


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A checkpoint with other tensors, whose index says so."""
    (file,) = path.glob("*.safetensors")
    arrays = {name: np.array(array) for name, array in SafetensorsFile(file).items()}
    change(arrays)
    save_arrays(arrays, file)
    index = {"weight_map": dict.fromkeys(arrays, file.name)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("to", TARGETS)
def test_whole_checkpoints_are_whole(to: str, model: Path, tmp_path: Path) -> None:
    assert complete(model)["ok"]
    convert(model, tmp_path / "q", to)
    report = complete(tmp_path / "q")
    assert report["ok"], report
    assert report["quantized"] == 3 * LAYERS


@pytest.mark.parametrize("name", MAKERS)
def test_producers_checkpoints_are_whole(name: str, tmp_path: Path) -> None:
    report = complete(MAKERS[name](tmp_path / name))
    assert not report["problems"] and not report["unread"], report


@pytest.mark.parametrize("to", TARGETS)
def test_every_missing_part_is_found(to: str, model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "q", to)
    (file,) = (tmp_path / "q").glob("*.safetensors")
    module = "model.layers.1.mlp.up_proj."
    for part in [name for name in SafetensorsFile(file) if name.startswith(module)]:
        convert(model, tmp_path / part, to)
        report = complete(changed(tmp_path / part, lambda arrays, part=part: arrays.pop(part)))  # type: ignore[misc]
        assert not report["ok"]
        assert part in report["missing"], (part, report)


def set_first(scale: str, value: float) -> Callable[[dict[str, Any]], None]:
    def change(arrays: dict[str, Any]) -> None:
        arrays[f"model.layers.1.mlp.up_proj.{scale}"].reshape(-1)[0] = value

    return change


def clear(arrays: dict[str, Any]) -> None:
    arrays["model.layers.1.mlp.up_proj.weight_scale_inv"][:] = 0


def drop_layer(arrays: dict[str, Any]) -> None:
    for name in [n for n in arrays if ".layers.2." in n]:
        del arrays[name]


def stray(arrays: dict[str, Any]) -> None:
    arrays["model.layers.1.mlp.other.weight_scale_inv"] = np.ones((1, 2), np.float32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_first("weight_scale_inv", np.nan), "scales are NaN"),
        (set_first("weight_scale_inv", np.inf), "scales are infinite"),
        (set_first("weight_scale_inv", 0), "their scales are zero, their codes are not"),
        (clear, "every scale is zero: never written?"),
        (drop_layer, "model.layers.2"),
        (stray, "model.layers.1.mlp.other.weight_scale_inv"),
    ],
)
def test_what_was_never_written_is_found(change: Any, says: str, model: Path, tmp_path: Path, capsys: Any) -> None:
    convert(model, tmp_path / "q", "deepseek")
    path = changed(tmp_path / "q", change)
    report = complete(path)
    assert not report["ok"]
    assert says in json.dumps(report)
    assert main(["verify", "--complete", str(path)]) == 1
    out = capsys.readouterr().out
    assert says in " ".join(out.split())  # lines are wrapped
    assert out.endswith("not ok\n")


def test_a_weight_of_zeros_and_numbers_that_are_none_are_found(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "b", "bf16")

    def change(arrays: dict[str, Any]) -> None:
        arrays["model.layers.0.mlp.up_proj.weight"][:] = 0
        arrays["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan

    problems = {p["tensor"]: p["problem"] for p in complete(changed(tmp_path / "b", change))["problems"]}
    assert problems == {
        "model.layers.0.mlp.up_proj.weight": "every element is zero: never written?",
        "model.layers.1.mlp.up_proj.weight": "1 elements are not finite",
    }


def test_it_wants_one_checkpoint(model: Path, capsys: Any) -> None:
    assert main(["verify", "--complete", str(model)]) == 0
    assert main(["verify", "--complete", str(model), str(model)]) == 2
    assert main(["verify", str(model)]) == 2
    assert "B must be given" in capsys.readouterr().err
