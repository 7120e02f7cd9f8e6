# SPDX-License-Identifier: Apache-2.0
"""Packed weights: 0.75 bytes a code, the values and products of codes of a byte each."""

import copy
import dataclasses
import io
import pickle

import breccia
import cases
import numpy as np
import pytest
from breccia import PackedWeight, ScaledTensor, comparison, pack
from breccia.value import sixes

K, N = 256, 48
FORMATS = pytest.mark.parametrize("fmt", ["E2M3", "E3M2"])
FRAMEWORKS = ("numpy", "torch", "jax", "mlx")


def weight(fmt="E2M3", shape=(N, K)):
    return breccia.cast(cases.normal(shape, seed=1), breccia.MXFP6BlockScaling(fmt))


def placed(scaled, framework):
    pytest.importorskip({"mlx": "mlx.core"}.get(framework, framework))
    return scaled.to(framework)


def same(found, wanted):
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


@FORMATS
def test_memory(fmt):
    w = weight(fmt)
    packed = pack(w)
    assert type(packed) is PackedWeight
    assert packed.packed_data.shape == (N, K * 3 // 4)
    assert packed.nbytes == N * K * 3 // 4 + w.scale.nbytes
    assert (packed.shape, packed.ndim, packed.size, len(packed)) == (w.shape, 2, w.size, N)
    assert (packed.recipe, packed.layout, packed.original_dtype) == (w.recipe, w.layout, w.original_dtype)
    assert packed == w
    assert hash(packed) == hash(w)
    assert packed != weight("E3M2" if fmt == "E2M3" else "E2M3")
    assert pack(packed) is packed
    assert type(packed.unpacked()) is ScaledTensor
    same(packed.unpacked().data, w.data)


def test_every_bit_has_its_place():
    codes = np.random.default_rng(3).integers(0, 64, (3, 20)).astype(np.uint8)
    bits = np.unpackbits(codes[..., None], axis=-1, count=6, bitorder="little").reshape(3, -1)
    same(sixes.pack(codes), np.packbits(bits, axis=-1, bitorder="little"))
    same(sixes.pack(codes | 0xC0), sixes.pack(codes))
    same(sixes.unpack(sixes.pack(codes)), codes)
    assert sixes.unpack(np.zeros((0, 6), np.uint8)).shape == (0, 8)


def test_the_bytes_are_those_of_the_peer():
    """compressed-tensors' own packer."""
    torch = pytest.importorskip("torch")
    peer = pytest.importorskip("compressed_tensors.compressors.mxfp6.helpers")
    w = weight().to("torch")
    values = breccia.dequantize(
        breccia.ScaledTensor(w.data, torch.full_like(w.scale.view(torch.uint8), 127), w.recipe, w.layout)
    )
    theirs = peer.pack_fp6_to_uint8(values)
    assert torch.equal(pack(w).packed_data, theirs)


@FORMATS
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_verbs(framework, fmt):
    w = placed(weight(fmt), framework)
    packed = pack(w)
    assert type(packed.packed_data) is type(w.data)
    same(packed.data, w.data)
    x = placed(breccia.cast(cases.normal((5, K)), "mxfp8"), framework)
    values = breccia.dequantize(x)
    for act in (values, x):
        same(breccia.linear(act, packed), breccia.linear(act, w))
        same(breccia.matmul(act, packed.T), breccia.matmul(act, w.T))
        if framework != "mlx" or act is x:  # MLX's own @ asks nobody
            same(act @ packed.T, act @ w.T)
    same(breccia.dequantize(packed), breccia.dequantize(w))
    same(packed.dequantize("float16"), w.dequantize("float16"))
    for name in ("mxfp8", "nvfp4", "int8"):
        assert breccia.requantize(packed, name) == breccia.requantize(w, name)
    assert breccia.requantize(packed, packed.recipe) is packed
    assert breccia.concatenate([packed, packed]) == breccia.concatenate([w, w])


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_views_and_copies_stay_packed(framework):
    w = placed(weight(), framework)
    packed = pack(w)
    keys = (slice(8, 16), slice(0, 0), (slice(None), slice(32, 96)), (slice(1, 2), slice(64, None)), [3, 1])
    for key in keys:
        assert type(packed[key]) is PackedWeight
        assert packed[key] == w[key]
    assert packed[:2].packed_data.shape == (2, K * 3 // 4)
    with pytest.raises(ValueError, match="an index of axis -1 must be a slice of whole blocks of 32"):
        packed[:, :4]
    assert packed.reshape(2, N // 2, K) == w.reshape(2, N // 2, K)
    assert packed.reshape(2, N // 2, K)[1] == w[N // 2 :]
    for again in (copy.copy(packed), packed.cpu(), packed.detach(), packed.map(lambda part: part)):
        assert type(again) is PackedWeight
        assert again == packed
    if framework != "mlx":  # whose arrays do not pickle
        for again in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed)), dataclasses.replace(packed)):
            assert type(again) is PackedWeight
            assert again == packed
    back = packed.to("numpy")
    assert type(back) is PackedWeight
    same(back.data, weight().data)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_view_stays_packed(framework):
    if framework == "numpy":
        pytest.importorskip("ml_dtypes")  # which has its dtype of scales
    packed = pack(placed(weight(), framework))
    assert type(packed.view()) is PackedWeight
    assert packed.view() == packed


def test_a_slice_of_rows_shares_memory():
    packed = pack(weight())
    assert np.shares_memory(packed[3:5].packed_data, packed.packed_data)
    assert np.shares_memory(packed[:, 32:].packed_data, packed.packed_data)


def test_the_constructor_takes_either_form():
    w = weight()
    packed = pack(w)
    for data, shape in ((w.data, None), (packed.packed_data, None), (packed.packed_data, w.shape), (w.data, w.shape)):
        made = PackedWeight(data, w.scale, w.recipe, w.layout, shape=shape)
        assert made == w
        same(made.packed_data, packed.packed_data)
    with pytest.raises(ValueError, match=r"scale.shape must be"):
        PackedWeight(packed.packed_data[:, :96], w.scale, w.recipe, w.layout)
    for dtype in (np.int8, np.int32, np.float32):
        with pytest.raises(TypeError, match=f"data must be uint8 where four codes .* got {np.dtype(dtype)}"):
            PackedWeight(packed.packed_data.astype(dtype), w.scale, w.recipe, w.layout)
    with pytest.raises(ValueError, match="shape"):
        PackedWeight(w.data, w.scale, w.recipe, w.layout, shape=())
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'packed_data'"):
        packed.packed_data = w.data


def test_one_turn_or_join_makes_the_codes_once(monkeypatch):
    packed, made, unpack = pack(weight()), [], sixes.unpack
    monkeypatch.setattr(sixes, "unpack", lambda bytes_: made.append(1) or unpack(bytes_))
    packed.T  # noqa: B018 (a property that makes a view)
    assert len(made) == 1
    breccia.concatenate([packed, packed])
    assert len(made) == 3


def test_what_it_shows():
    """What it is, as it takes three quarters of what a ScaledTensor of the same shape takes."""
    for q in (pack(weight()), breccia.prepare(weight())):
        name = f"breccia.{type(q).__name__}"
        assert repr(q) == repr(weight()).replace("breccia.ScaledTensor", name)
        assert f"<caption>{name}</caption>" in q._repr_html_()


def test_refusals():
    with pytest.raises(TypeError, match="w must be a ScaledTensor, got ndarray"):
        pack(cases.normal((2, 32)))
    for recipe, bits in (("mxfp8", 8), ("nvfp4", 4), ("int8", 8)):
        with pytest.raises(ValueError, match=rf"w must have codes of 6 bits \(MXFP6\) to be packed, got .* of {bits}"):
            pack(breccia.cast(cases.normal((4, 128)), recipe))
    with pytest.raises(ValueError, match=r"w must not be a transposed view: pack its .mT"):
        pack(weight().T)


def test_files_hold_a_byte_a_code_and_bridges_three_quarters(tmp_path):
    w = weight()
    packed = pack(w)
    breccia.save({"w": packed}, tmp_path / "w.safetensors")
    loaded = breccia.load(tmp_path / "w.safetensors")["w"]
    assert type(loaded) is ScaledTensor
    assert loaded == w
    parts = breccia.bridges.to_compressed_tensors(packed)
    assert np.shares_memory(parts["weight_packed"], packed.packed_data)
    for name, array in breccia.bridges.to_compressed_tensors(w).items():
        same(parts[name], array)
    assert pack(breccia.bridges.from_compressed_tensors(parts)) == packed


def test_experts():
    w = weight(shape=(3, 32, K))
    x, offsets = cases.normal((6, K)), np.array([0, 2, 2, 6])
    same(breccia.grouped_matmul(x, pack(w), offsets), breccia.grouped_matmul(x, w, offsets))
    square = weight(shape=(64, K))
    assert breccia.transpose(pack(square)).value == breccia.transpose(square).value


def test_jit():
    jax = pytest.importorskip("jax")
    w = weight().to("jax")
    x = jax.numpy.asarray(cases.normal((4, K)))
    product = jax.jit(breccia.linear)
    same(product(x, pack(w)), product(x, w))
    leaves, tree = jax.tree_util.tree_flatten(pack(w))
    assert leaves[0].shape == (N, K * 3 // 4)
    assert type(jax.tree_util.tree_unflatten(tree, leaves)) is PackedWeight


def layers(torch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(K, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32))
    return breccia.quantize_(model, "mxfp6")


def test_layers():
    torch = pytest.importorskip("torch")
    model, x = layers(torch), torch.randn(3, K)
    wanted, plain = model(x), {name: part.clone() for name, part in model.state_dict().items()}
    before = sum(part.nbytes for part in plain.values())
    assert breccia.nn.pack_(model) is model
    assert type(model[0].weight) is PackedWeight
    state = {name: part.clone() for name, part in model.state_dict().items()}
    assert sum(part.nbytes for part in state.values()) == before - (K * 96 + 96 * 32) // 4
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=False)
    for changed in (model, loaded, copy.deepcopy(model), model.double().float()):
        assert type(changed[0].weight) is PackedWeight
        assert torch.equal(changed(x), wanted)
    for given in (plain, state):  # either form loads into either
        for target in (breccia.nn.pack_(layers(torch)), layers(torch)):
            for part in target.state_dict().values():
                part.zero_()
            target.load_state_dict(given)
            assert torch.equal(target(x), wanted)
    for columns in (K * 3 // 4 + 1, K * 3 // 4 - 1):
        with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight_data"):
            layers(torch).load_state_dict({**state, "0.weight_data": torch.zeros(96, columns, dtype=torch.uint8)})
    given = torch.randn(3, K, requires_grad=True)
    model(given).sum().backward()
    assert given.grad.abs().sum() > 0
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted)


def test_layers_that_are_not_packed():
    torch = pytest.importorskip("torch")
    with pytest.warns(UserWarning, match="pack_ changed nothing: Linear has no QuantizedLinear of MXFP6BlockScaling"):
        breccia.nn.pack_(torch.nn.Linear(4, 4))
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module that contains quantized layers, got list"):
        breccia.nn.pack_([])
    model = layers(torch)
    model[2].make_shardable_()
    with pytest.raises(ValueError, match="weight must be put into a layer before make_shardable_"):
        breccia.nn.pack_(model)
    assert type(model[0].weight) is ScaledTensor
    sharded = breccia.nn.pack_(layers(torch))[0].make_shardable_()
    assert type(breccia.nn.pack_(torch.nn.Sequential(sharded))[0].weight) is PackedWeight
    x = torch.randn(2, K)
    assert torch.equal(sharded(x), layers(torch)[0](x))


def test_the_core_reads_codes_that_are_there():
    pytest.importorskip("torch")
    packed = pack(weight(shape=(512, K)).to("torch"))
    core = packed._core
    packed.data.fill_(7)  # memory that was given back would be taken here
    same(breccia._core.count_codes(core), comparison.count_codes(weight(shape=(512, K))).counts)
    same(comparison.count_codes(packed).counts, comparison.count_codes(weight(shape=(512, K))).counts)


def test_memory_can_still_be_resized():
    """FSDP gives back what it has gathered."""
    torch = pytest.importorskip("torch")
    w = ScaledTensor._of(weight()._form, torch.from_numpy(weight().data).clone(), torch.from_numpy(weight().scale))
    packed = pack(w)
    assert w.data.untyped_storage().resizable()
    bytes_ = packed.packed_data.clone()
    sixes.unpack(bytes_)
    assert bytes_.untyped_storage().resizable()
    layer = breccia.nn.QuantizedLinear(packed).make_shardable_()
    assert layer.weight_data.untyped_storage().resizable()


def test_torch_trees(tmp_path):
    torch = pytest.importorskip("torch")
    packed = pack(weight().to("torch"))
    leaves, tree = torch.utils._pytree.tree_flatten(packed)
    assert leaves[0].shape == (N, K * 3 // 4)
    assert torch.utils._pytree.tree_unflatten(leaves, tree) == packed
    torch.save(packed, tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    assert type(loaded) is PackedWeight
    assert loaded == packed
