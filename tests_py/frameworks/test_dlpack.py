# SPDX-License-Identifier: Apache-2.0
"""Buffers from framework to framework: the same memory, proven by addresses."""

import breccia
import cases
import numpy as np
import peers
import pytest
from breccia import cast
from breccia.bridges import load_safetensors
from breccia.dlpack import from_dlpack, to_dlpack

# MLX imports by copying on a CPU; XLA takes over memory only if it is aligned to 64 bytes, as torch's is and what the
# core allocates for NumPy.
SHARED = [("numpy", "torch"), ("torch", "numpy"), ("torch", "jax"), ("jax", "torch"), ("jax", "numpy")]
SHARED += [("numpy", "jax"), ("mlx", "numpy"), ("mlx", "torch")]
SHARED = [pair for pair in SHARED if set(pair) <= set(peers.PEERS)]
PARTS = ("data", "scale", "zero_point", "global_scale")


def address(array):
    if hasattr(array, "unsafe_buffer_pointer"):
        return array.unsafe_buffer_pointer()
    if hasattr(array, "data_ptr"):
        return array.data_ptr()
    return np.asarray(array).__array_interface__["data"][0]


@pytest.mark.parametrize(("source", "goal"), SHARED)
@cases.some("current block-tile mxfp8 mxfp6-e2m3 mxfp4 nvfp4 int4-asymmetric int8-asymmetric")
def test_no_copy(source, goal, recipe):
    x = cases.normal((4, 256))
    scaled = cast(peers.PEERS[source]().array(x), recipe)
    moved = from_dlpack(scaled, goal)
    for part in PARTS:
        a, b = getattr(scaled, part), getattr(moved, part)
        assert (a is None) == (b is None)
        if a is not None and "bfloat16" not in str(a.dtype):  # ml_dtypes needs a view of its own
            assert address(a) == address(b), part
    peers.same_parts(peers.PEERS[goal](), moved, cast(x, recipe))
    assert moved.recipe == recipe
    assert moved.layout == scaled.layout
    assert moved.shape == scaled.shape
    if goal == "torch":
        native = cast(peers.PEERS["torch"]().array(x), recipe)
        assert (moved.data.dtype, moved.scale.dtype) == (native.data.dtype, native.scale.dtype)


@peers.ALL
def test_transposed_and_odd_tensors_move(peer):
    for goal in peers.PEERS:
        for recipe, shape in ((breccia.NVFP4BlockScaling(), (32, 64)), (breccia.INT4Scaling(group_size=5), (3, 15))):
            x = cases.normal(shape)
            moved = cast(peer.array(x), recipe).T.to(goal)
            assert moved.shape == shape[::-1]
            values = peers.PEERS[goal]().host(breccia.dequantize(moved))
            np.testing.assert_array_equal(values, breccia.dequantize(cast(x, recipe)).T)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax"])
def test_capsules(name):
    if name not in peers.PEERS:
        pytest.skip(f"{name} is not installed")
    scaled = cast(peers.PEERS[name]().array(cases.normal((4, 256))), breccia.NVFP4BlockScaling())
    data, scale = capsules = to_dlpack(scaled)
    assert capsules.zero_point is None
    assert capsules.dtypes[3] == "float32"
    torch = pytest.importorskip("torch")
    assert torch.from_dlpack(data).data_ptr() == address(scaled.data)
    assert torch.from_dlpack(scale).dtype == torch.uint8
    assert torch.from_dlpack(capsules.global_scale).item() == float(np.asarray(scaled.global_scale))


@peers.OTHERS
def test_others_may_write_to_what_was_read_only(peer, tmp_path):
    path = tmp_path / "w.safetensors"
    scaled = cast(cases.normal((4, 256)), breccia.NVFP4BlockScaling())
    breccia.bridges.save_safetensors({"w": scaled}, path)
    stored = path.read_bytes()
    views = load_safetensors(path)["w"]
    loaded = {"from the file": load_safetensors(path, peer.name)["w"], "by to()": views.to(peer.name)}
    for way, moved in loaded.items():
        peers.same_parts(peer, moved, scaled, way)
        if peer.name == "torch":
            for part in (moved.data, moved.scale, moved.global_scale):
                part.reshape(-1).view(peer.torch.uint8).zero_()
            assert not breccia.dequantize(moved).any()
    peers.same_parts(peers.PEERS["numpy"](), views, scaled)
    assert path.read_bytes() == stored


def test_capsules_of_read_only_arrays_may_be_written_to():
    torch = pytest.importorskip("torch")
    data = np.zeros((4, 256), np.uint8)
    data.flags.writeable = False
    scaled = breccia.from_buffer(data, np.ones((), np.float32), breccia.Float8CurrentScaling(), breccia.PerTensor())
    torch.from_dlpack(to_dlpack(scaled)[0]).fill_(1)
    assert not data.any()


def test_a_state_loads_into_a_layer_over_a_mapped_file(tmp_path):
    torch = pytest.importorskip("torch")
    from breccia.nn import QuantizedLinear

    x = cases.normal((4, 256))
    breccia.bridges.save_safetensors({"w": cast(x, breccia.NVFP4BlockScaling())}, tmp_path / "w.safetensors")
    layer = QuantizedLinear(load_safetensors(tmp_path / "w.safetensors", "torch")["w"])
    other = QuantizedLinear(cast(torch.from_numpy(2 * x), breccia.NVFP4BlockScaling()))
    before = layer.weight
    layer.load_state_dict(other.state_dict())
    assert layer.weight.data is before.data
    assert torch.equal(breccia.dequantize(layer.weight), breccia.dequantize(other.weight))


def test_a_state_becomes_the_buffers_of_a_layer_where_it_is_asked_to():
    torch = pytest.importorskip("torch")
    from breccia.nn import QuantizedLinear

    x = torch.from_numpy(cases.normal((4, 256)))
    for recipe in (breccia.NVFP4BlockScaling(), breccia.MXFP8BlockScaling(), breccia.INT4Scaling()):
        layer, other = (QuantizedLinear(cast(part, recipe)) for part in (x, 2 * x))
        layer.load_state_dict(other.state_dict(), assign=True)
        assert layer.weight == other.weight
        assert layer.weight.data.data_ptr() == other.weight.data.data_ptr()
        assert layer.weight.data.dtype == other.weight.data.dtype


def test_clear_errors():
    with pytest.raises(TypeError, match="scaled must be a ScaledTensor"):
        to_dlpack(np.zeros(3))
    with pytest.raises(ValueError, match="framework must be one of"):
        from_dlpack(cast(cases.normal((2, 4)), breccia.Float8CurrentScaling()), "cupy")
