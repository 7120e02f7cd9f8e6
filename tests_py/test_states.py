# SPDX-License-Identifier: Apache-2.0
"""A state of codes goes only into a layer in which the codes mean the same."""

import copy
import io
import itertools
import pickle
import tempfile
import warnings

import breccia
import cases
import pytest

torch = pytest.importorskip("torch")
from breccia.nn import QuantizedLinear  # noqa: E402

WEIGHT = torch.from_numpy(cases.normal((256, 256)))


def layer(recipe, weight=WEIGHT):
    linear = torch.nn.Linear(256, 256, bias=False)
    linear.weight.data = weight.clone()
    return breccia.quantize_layer(linear, recipe)


LAYERS = {name: layer(recipe) for name, recipe in cases.RECIPES.items()}


def by_torch(state):
    return state


def plain(state):
    return dict(state)


def saved(state):
    torch.save(state, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_safetensors(state):
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        save_file({name: part.contiguous() for name, part in state.items()}, f"{folder}/a.safetensors")
        return load_file(f"{folder}/a.safetensors")


def pickled(state):
    as_bytes = {name: (part.reshape(-1).view(torch.uint8), part.dtype, part.shape) for name, part in state.items()}
    packed = pickle.loads(pickle.dumps(as_bytes))
    return {name: raw.view(dtype).reshape(shape) for name, (raw, dtype, shape) in packed.items()}


@pytest.mark.parametrize("way", [by_torch, plain, saved, by_safetensors, copy.deepcopy, pickled])
def test_every_ordered_pair_of_formats_loads_the_same_values_or_is_refused(way):
    """Also with parts missing or left over (strict=False), and by assignment."""
    if way is by_safetensors:
        pytest.importorskip("safetensors")
    wanted = {name: breccia.dequantize(one.weight) for name, one in LAYERS.items()}
    states = {name: way(one.state_dict()) for name, one in LAYERS.items()}
    wrong, loaded = [], 0
    for of, into in itertools.product(LAYERS, LAYERS):
        for options in ({}, {"strict": False}, {"assign": True})[: 3 if way in (by_torch, plain) else 1]:
            target = layer(cases.RECIPES[into], torch.zeros(256, 256))
            before = {name: part.clone() for name, part in target.state_dict().items()}
            try:
                target.load_state_dict(copy.copy(states[of]), **options)
            except RuntimeError:
                if "assign" not in options and any(not _same(before[n], p) for n, p in target.state_dict().items()):
                    wrong.append((of, into, options, "changed a layer that it was refused by"))
                continue
            loaded += 1
            if not torch.equal(breccia.dequantize(target.weight), wanted[of]):
                wrong.append((of, into, options))
    assert not wrong, f"{len(wrong)}: {wrong[:8]}"
    assert loaded >= len(LAYERS)


def _same(a, b):
    return a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_a_state_that_says_nothing_warns_once_or_as_is_chosen(monkeypatch):
    """As files of older versions."""
    model = torch.nn.Sequential(*(breccia.quantize_layer(torch.nn.Linear(64, 64), "mxfp8") for _ in range(3)))
    state = {name: part for name, part in model.state_dict().items() if not name.endswith("weight_form")}
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model.load_state_dict(state)
        assert len(seen) == 1
        assert str(seen[0].message).startswith("state_dict must say what its codes mean, as states of breccia")
        model.load_state_dict(state)
        assert len(seen) == 2
        model[0].unmarked_states = model[1].unmarked_states = model[2].unmarked_states = "load"
        model.load_state_dict(state)
        assert len(seen) == 2
    del model[0].unmarked_states, model[1].unmarked_states, model[2].unmarked_states
    monkeypatch.setattr(QuantizedLinear, "unmarked_states", "refuse")
    with pytest.raises(RuntimeError, match=r"state_dict must say what its codes mean"):
        model.load_state_dict(state)


def test_parts_put_past_load_state_dict_are_checked():
    """As accelerate puts them, one by one."""
    e2m3, e3m2 = (
        breccia.quantize_layer(torch.nn.Linear(64, 64), breccia.MXFP6BlockScaling(f)) for f in ("E2M3", "E3M2")
    )
    for name, part in e3m2.state_dict().items():
        if name != "bias":
            e2m3._buffers[name] = part
    with pytest.raises(ValueError, match=r"weight_data must be codes of mxfp6\(.*E2M3.*got mxfp6\(.*E3M2"):
        e2m3(torch.randn(2, 64))


def test_accelerate_dispatches_a_checkpoint(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    from safetensors.torch import save_model

    def made(recipe):
        torch.manual_seed(0)
        return breccia.quantize_(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 64)), recipe)

    first = made("int8")
    save_model(first, str(tmp_path / "model.safetensors"))
    again = accelerate.load_checkpoint_and_dispatch(
        made("int8"), str(tmp_path / "model.safetensors"), device_map={"": "cpu"}
    )
    x = torch.randn(4, 256)
    assert torch.equal(again(x), first(x))
    other = made(breccia.INT8Scaling(scale_dtype="fp16"))
    with pytest.raises((ValueError, RuntimeError), match=r'weight_data must be codes of |in "weight_form"'):
        accelerate.load_checkpoint_and_dispatch(other, str(tmp_path / "model.safetensors"), device_map={"": "cpu"})(x)


def test_checkpoints_of_torch_distributed(tmp_path):
    import torch.distributed.checkpoint as dcp

    recipes = {**cases.RECIPES, **{f: breccia.MXFP6BlockScaling(f) for f in ("E2M3", "E3M2")}}
    layers = {name: torch.nn.Sequential(layer(recipe)) for name, recipe in recipes.items()}
    parts = {
        name: {n: (p.shape, p.dtype) for n, p in one.state_dict().items() if not n.endswith("weight_form")}
        for name, one in layers.items()
    }
    alike = [pair for pair in itertools.product(layers, layers) if parts[pair[0]] == parts[pair[1]]]
    loaded = set()
    for of, into in alike:
        if not (tmp_path / of).exists():
            dcp.save({"model": layers[of].state_dict()}, checkpoint_id=tmp_path / of, no_dist=True)
        other = torch.nn.Sequential(layer(recipes[into], torch.zeros(256, 256)))
        before = {name: part.clone() for name, part in other.state_dict().items()}
        state = {"model": other.state_dict()}
        try:
            dcp.load(state, checkpoint_id=tmp_path / of, no_dist=True)
            other.load_state_dict(state["model"])
        except (RuntimeError, dcp.api.CheckpointException):
            assert all(_same(before[name], part) for name, part in other.state_dict().items()), (of, into)
            continue
        loaded.add((of, into))
        assert torch.equal(breccia.dequantize(other[0].weight), breccia.dequantize(layers[of][0].weight)), (of, into)
    assert {(name, name) for name in layers} <= loaded and len(alike) > len(loaded)
    assert {("mxfp8", "mxfp8-floor"), ("mxfp8-mse", "mxfp8"), ("mxfp4-even", "mxfp4")} <= loaded, "codes mean the same"
    assert ("E2M3", "E3M2") in alike and ("E2M3", "E3M2") not in loaded


def test_torch_distributed_loads_codes_of_a_weight_of_another_dtype(tmp_path):
    """What a weight was before decides no value."""
    import torch.distributed.checkpoint as dcp

    first, other = (layer("mxfp8", WEIGHT.to(dtype)) for dtype in (torch.bfloat16, torch.float32))
    dcp.save({"model": first.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state["model"])
    assert _same(other.weight_data, first.weight_data)
