# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every format into sharded models, over gloo: values, codes, and what each rank reads and holds."""

import os
import shutil
from pathlib import Path

import breccia
import numpy as np
import pytest
from breccia import bridges
from breccia.autograd import LinearRecipes
from breccia.bridges import packing
from breccia.checkpoint import Checkpoint, convert, target_names
from checkpoints import MAKERS, weight, write_shards

ml_dtypes = pytest.importorskip("ml_dtypes")

torch = pytest.importorskip("torch")
import distributed_ranks  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
import torch.distributed.checkpoint as dcp  # noqa: E402
from breccia import distributed  # noqa: E402
from breccia.checkpoint.files.input_file import InputFile  # noqa: E402
from breccia.distributed.checkpoints import reader as reader_module  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Shard, distribute_tensor  # noqa: E402

TARGETS = [name for name in target_names() if ":" in name]
SHAPES = {"q_proj": (384, 256), "o_proj": (328, 512), "up_proj": (200, 256), "wide": (64, 1024)}


class Model(torch.nn.Module):
    """Its state dict has the names and shapes of the checkpoints that the tests make."""

    def __init__(self):
        super().__init__()
        for name, (rows, columns) in SHAPES.items():
            layer = torch.nn.Linear(columns, rows, bias=name == "wide", dtype=torch.bfloat16)
            setattr(self, name, layer)
        self.norm = torch.nn.LayerNorm(256, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(7)


def sharded(model, world):
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One small model in every format, and its values in bf16."""
    folder = tmp_path_factory.mktemp("formats")
    arrays = {f"{name}.weight": weight(*shape) for name, shape in SHAPES.items()}
    arrays["norm.weight"] = weight(256)
    arrays["wide.bias"] = weight(64).astype(ml_dtypes.bfloat16)
    first = {name: arrays.pop(name) for name in ("q_proj.weight", "norm.weight")}
    write_shards(folder / "in", [first, arrays], {"model_type": "deepseek_v4"})
    for to in TARGETS:
        convert(folder / "in", folder / to.replace(":", "-"), to)
        convert(folder / to.replace(":", "-"), folder / f"{to.replace(':', '-')}.bf16", "bf16")
    return folder


def expected_of(folder, to):
    checkpoint = Checkpoint(folder / f"{to.replace(':', '-')}.bf16")
    return {one.name: torch.from_numpy(np.array(checkpoint.array(one.name), np.float32)) for one in checkpoint.found}


def loads_values(rank, world, folder):
    for to in TARGETS:
        model = sharded(Model(), world) if world > 1 else Model()
        distributed.load(model, folder / to.replace(":", "-"))
        values = expected_of(folder, to)
        for name, value in model.state_dict().items():
            assert torch.equal(whole(value).float(), values[name].to(value.dtype).float()), (to, name)


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_float_parameters_get_the_values_of_every_format(world, sources):
    distributed_ranks.run(world, loads_values, sources)


def codes_of(folder, to):
    """Parts of every tensor as bytes, and as one process reads them."""
    checkpoint = Checkpoint(folder / to.replace(":", "-"))
    for found in map(checkpoint.refined, checkpoint.found):
        loaded = checkpoint.load(found)
        if isinstance(loaded, breccia.ScaledTensor):
            parts = {name: getattr(loaded.to("torch"), name) for name in ("scale", "zero_point", "global_scale")}
            four = breccia.formats.finfo(loaded.recipe.element).bits == 4
            data = torch.tensor(packing.packed_codes(loaded)) if four else loaded.to("torch").data
            yield found, {"data": data, **parts}


def loads_codes(rank, world, folder):
    kept = set()
    for to in TARGETS:
        path, tensors = folder / to.replace(":", "-"), list(codes_of(folder, to))
        if not tensors:
            continue
        model = distributed.quantize_as_(Model(), path)
        model = sharded(model, world) if world > 1 else model
        distributed.load(model, path)
        state = {name: whole(value) for name, value in model.state_dict().items()}
        for found, tensor in tensors:
            for part, stored in tensor.items():
                held = state.get(f"{found.name}_{part}")
                assert (stored is None) == (held is None), (to, found.name, part)
                if stored is not None:
                    said = stored.contiguous().reshape(-1).view(torch.uint8)
                    assert torch.equal(held.contiguous().reshape(-1).view(torch.uint8), said), (to, found.name, part)
        kept.add(to.partition(":")[0])
    written = {name for name, bridge in bridges.registry().items() if bridge.writes and bridge.recipes}
    assert len(kept) >= len(written) - 2, written - kept  # those of values that a ScaledTensor cannot say


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_quantized_layers_get_the_codes_as_they_are(world, sources):
    distributed_ranks.run(world, loads_codes, sources)


def loads_codes_before_2_13(rank, world, folder):
    distributed_ranks.before_2_13()
    loads_codes(rank, world, folder)


@pytest.mark.in_turn
def test_quantized_layers_get_the_codes_under_earlier_torch(sources):
    distributed_ranks.run(2, loads_codes_before_2_13, sources)


def peak_of(call):
    """Bytes by which this process grew at most, and bytes it read from the checkpoint."""
    counted, read = [0], InputFile.array

    def counting(self, start, stop):
        counted[0] += stop - start
        return read(self, start, stop)

    def status(key):
        return 1024 * int(next(line for line in Path("/proc/self/status").open() if line.startswith(key)).split()[1])

    InputFile.array = counting
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
        before = status("VmRSS")
        call()
        return status("VmHWM") - before, counted[0]
    finally:
        InputFile.array = read


def reads_its_share(rank, world, folder):
    reader_module._PIECE = 4 << 20
    floats = [(to, False) for to in ("compressed-tensors:nvfp4", "deepseek", "gptq", "mlx", "gguf")]
    for to, codes in (*floats, ("compressed-tensors:nvfp4", True), ("deepseek", True)):
        path = folder / to.replace(":", "-")
        files = [path] if path.is_file() else list(path.glob("*.safetensors"))
        stored = sum(file.stat().st_size for file in files)
        layers = torch.nn.Sequential(*(torch.nn.Linear(2048, 1024, bias=False, dtype=torch.bfloat16) for _ in range(8)))
        model = sharded(distributed.quantize_as_(layers, path) if codes else layers, world)
        distributed.load(model, path)  # what a first call loads stays
        peak, count = peak_of(lambda model=model, path=path: distributed.load(model, path))
        tiles = 2 * 127 / 1024 if to == "deepseek" else 0  # rows beyond a rank's own, where tiles are cut
        assert count < stored * (1 / world + tiles + 0.08), (to, count, stored)
        if Path("/proc/self/clear_refs").exists():
            assert peak < 16 << 20, (to, peak)  # the model has 32 MiB in bf16, float32 values of one tensor 8


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_rank_reads_its_rows_and_holds_a_few_of_them(world, tmp_path):
    arrays = {f"{i}.weight": weight(1024, 2048).astype(ml_dtypes.bfloat16) for i in range(8)}
    write_shards(tmp_path / "in", [arrays], {})
    for to in ("compressed-tensors:nvfp4", "deepseek", "gptq", "mlx", "gguf"):
        convert(tmp_path / "in", tmp_path / to.replace(":", "-"), to, include=["*"])
    distributed_ranks.run(world, reads_its_share, tmp_path)


def cuts_columns(rank, world, folder):
    mesh = init_device_mesh("cpu", (world,))
    for to in ("deepseek:block", "modelopt:nvfp4", "awq:int4", "compressed-tensors:int8", "gguf:q4_0"):
        values = expected_of(folder, to)
        state = {
            f"{name}.weight": distribute_tensor(torch.full(shape, 7.0), mesh, [Shard(1)])
            for name, shape in SHAPES.items()
        }
        dcp.load(state, storage_reader=distributed.CheckpointReader(folder / to.replace(":", "-")))
        for name, value in state.items():
            assert torch.equal(value.full_tensor().bfloat16().float(), values[name]), (to, name)


def test_columns_may_be_cut_anywhere(sources):
    distributed_ranks.run(3, cuts_columns, sources)


def test_what_producers_write_is_read(tmp_path):
    """By the reader alone, into plain tensors of the checkpoint's own names."""
    for name, make in MAKERS.items():
        path = make(tmp_path / name)
        reader = distributed.CheckpointReader(path)
        metadata = reader.read_metadata().state_dict_metadata
        state = {key: torch.full(said.size, 7, dtype=said.properties.dtype) for key, said in metadata.items()}
        dcp.load(state, storage_reader=reader)
        checkpoint = Checkpoint(path)
        for found in checkpoint.found:
            loaded = checkpoint.load(found)
            values = loaded.dequantize() if hasattr(loaded, "dequantize") else np.asarray(loaded, np.float32)
            assert torch.equal(state[found.name].float(), torch.tensor(values).to(torch.bfloat16).float())


def test_torch_reads_the_same_values_of_tiles(tmp_path):
    """torch's own reader of FP8 tiles of 128 x 128 is the oracle."""
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

    path = MAKERS["deepseek"](tmp_path / "in")
    checkpoint = Checkpoint(path)
    names = [one.name for one in checkpoint.found if one.format == "deepseek"]
    ours = {one.name: torch.zeros(one.shape) for one in checkpoint.found if one.name in names}
    theirs = {name: torch.zeros_like(value) for name, value in ours.items()}
    dcp.load(ours, storage_reader=distributed.CheckpointReader(path))
    dcp.load(theirs, storage_reader=QuantizedHuggingFaceStorageReader(path=str(path)))
    for name in names:
        assert torch.equal(ours[name], theirs[name]), name


def test_heads_that_share_the_embeddings_are_filled(tmp_path):
    write_shards(tmp_path / "in", [{"model.embed_tokens.weight": weight(32, 16)}], {})
    state = {name: torch.zeros(32, 16) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    dcp.load(state, storage_reader=distributed.CheckpointReader(tmp_path / "in"))
    assert torch.equal(state["lm_head.weight"], torch.from_numpy(weight(32, 16)))
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


def test_what_does_not_fit_is_named(sources):
    path = sources / "modelopt-nvfp4"
    model = breccia.quantize_(Model().float(), "mxfp8", lambda layer, name: name == "q_proj")
    with pytest.raises(ValueError, match=r"model: q_proj must have the checkpoint's recipe for its codes, NVFP4"):
        distributed.load(model, path)
    more = Model()
    more.extra = torch.nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"2 of 8 are not, such as 'extra.weight'"):
        distributed.load(more, path)
    with pytest.raises(ValueError, match=r"q_proj.weight must have the checkpoint's shape \(384, 256\), got \(3, 3\)"):
        other = Model()
        other.q_proj = torch.nn.Linear(3, 3)
        distributed.quantize_as_(other, path)
    with pytest.raises(ValueError, match=r"model must have a torch.nn.Linear that is quantized"):
        distributed.quantize_as_(torch.nn.Sequential(torch.nn.Linear(3, 3)), path)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got int"):
        distributed.load(3, path)


def loads_what_trains(rank, world, folder):
    recipes = LinearRecipes(*[breccia.DelayedScaling()] * 3)
    model = torch.nn.ModuleDict({"q_proj": breccia.nn.ScaledLinear(256, 384, bias=False, recipes=recipes)})
    model["up_proj"] = torch.compile(torch.nn.Linear(256, 200, bias=False), backend="eager")
    model["o_proj"] = breccia.nn.ScaledLinear(512, 328, bias=False, recipes=LinearRecipes.fp8())
    model["o_proj"].weight = distributed.ScaledParameter(model["o_proj"].weight, "mxfp8")
    for layer in model.values():
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    distributed.load(model, folder / "mlx-mxfp8")
    values = expected_of(folder, "mlx:mxfp8")
    for name, value in model.state_dict().items():
        if name.endswith("weight"):
            assert torch.equal(whole(value), values[name.replace("_orig_mod.", "")]), name


def test_layers_that_train_get_weights_and_keep_their_histories(sources):
    """A history of scales is in no checkpoint, and a compiled layer has another name."""
    distributed_ranks.run(2, loads_what_trains, sources)


def test_names_may_differ(sources):
    model = torch.nn.ModuleDict({"inner": Model()})
    path = sources / "mlx-mxfp8"
    distributed.load(model, path, names=lambda name: f"inner.{name}")
    values = expected_of(sources, "mlx:mxfp8")
    assert torch.equal(model["inner"].q_proj.weight.float(), values["q_proj.weight"])


def raises_on_every_rank(rank, world, folder):
    """One rank alone is given a checkpoint that does not do, and lives on after its error."""
    good = folder / "compressed-tensors-nvfp4"
    for bad in sorted((folder / "bad").iterdir()):
        for codes in (False, True):
            for who in range(world):
                model = distributed.quantize_as_(Model(), good) if codes else Model()
                model = sharded(model, world)
                try:
                    distributed.load(model, bad if rank == who else good)
                except (ValueError, OSError) as error:
                    said = str(error)
                else:
                    raise AssertionError(f"{bad.name}, seen by rank {who}: rank {rank} has no error")
                assert len(said.splitlines()) == 1 and len(said) < 600, said
                if rank != who:
                    assert f"rank {who} of group" in said, said
    distributed.load(sharded(Model(), world), good)


@pytest.mark.parametrize("world", [2, 3])
def test_no_rank_waits_for_one_that_sees_a_bad_checkpoint(world, sources, tmp_path):
    good = sources / "compressed-tensors-nvfp4"
    (tmp_path / "bad").mkdir()
    (tmp_path / good.name).symlink_to(good)
    for name in ("cut", "gone", "header"):
        shutil.copytree(good, tmp_path / "bad" / name)
        file = sorted((tmp_path / "bad" / name).glob("*.safetensors"))[-1]
        if name == "cut":
            os.truncate(file, file.stat().st_size - 100)
        elif name == "gone":
            file.unlink()
        else:
            file.write_bytes(b"\xff" * 64)
    arrays = {f"{name}.weight": weight(*shape) for name, shape in SHAPES.items()}
    arrays |= {"norm.weight": weight(256), "wide.bias": weight(64)}
    fewer = {name: array for name, array in arrays.items() if name != "up_proj.weight"}
    write_shards(tmp_path / "in", [fewer], {})
    convert(tmp_path / "in", tmp_path / "bad" / "fewer", "compressed-tensors:nvfp4")
    write_shards(tmp_path / "in2", [{**arrays, "up_proj.weight": weight(64, 512)}], {})
    convert(tmp_path / "in2", tmp_path / "bad" / "shape", "compressed-tensors:nvfp4")
    for name in ("gptq", "mlx-mxfp8"):
        (tmp_path / "bad" / name).symlink_to(sources / name)
    distributed_ranks.run(world, raises_on_every_rank, tmp_path)


def raises_while_it_reads(rank, world, folder):
    """An error of one rank's bytes is one of all, of the same kind, and no exception of torch's own."""
    for kind, wanted in (
        (ValueError, ValueError),
        (OSError, OSError),
        (MemoryError, MemoryError),
        (KeyError, ValueError),
    ):
        model, real = sharded(Model(), world), distributed.CheckpointReader._fulfil

        def fail(self, *arguments, kind=kind):
            raise kind(5, "it is so") if kind is OSError else kind("it is so")

        if rank == world - 1:
            distributed.CheckpointReader._fulfil = fail
        try:
            with pytest.raises(wanted, match=r"rank 1: .*it is so"):
                distributed.load(model, folder / "compressed-tensors-nvfp4")
        finally:
            distributed.CheckpointReader._fulfil = real


def test_errors_of_reading_are_those_of_all_ranks(sources):
    distributed_ranks.run(2, raises_while_it_reads, sources)


def test_another_shape_is_one_sentence(tmp_path):
    write_shards(tmp_path / "in", [{"0.weight": weight(8, 4)}], {})
    model = torch.nn.Sequential(torch.nn.Linear(4, 9, bias=False))
    with pytest.raises(ValueError, match=r"^model: 0.weight must have the checkpoint's shape \(8, 4\), got \(9, 4\)$"):
        distributed.load(model, tmp_path / "in")
