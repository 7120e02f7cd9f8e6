# SPDX-License-Identifier: Apache-2.0
"""What a mistake is answered with, to the last word: the argument, what it was, what it must be."""

import re
import subprocess
import sys

import breccia
import cases
import numpy as np
import pytest
from breccia import autograd, bridges, checkpoint, delayed, recipes
from breccia.bridges import OutsideTensor

X = cases.normal((8, 256))
Q = breccia.cast(X, "nvfp4")
FP8 = "Float8CurrentScaling(fp8_format='E4M3', granularity='tensor', scale_rule='torchao', scale_search='amax')"
INT4 = "INT4Scaling(group_size=128, signed=False, scale_dtype='fp16', symmetric=True, scale_search='amax')"
UNSIGNED = breccia.cast(X, breccia.INT4Scaling(signed=False))
OUTSIDE = OutsideTensor(breccia.cast(X, "int4"), columns=np.arange(256))
SHOWN = (
    "OutsideTensor(breccia.ScaledTensor(shape=(8, 256), data_dtype=uint8, scale_shape=(8, 2), recipe=INT4Scaling, "
    "layout=PerBlockK), columns of (256,))"
)
PATH = "must be a path (str or os.PathLike), got int"
NAMES = "delayed, current, block, mxfp8, mxfp6, mxfp4, nvfp4, int4, int8, fp8, fp8-row, fp8-block, fp8-row-block"

MESSAGES = {
    "out_dtype": (
        lambda: breccia.matmul(X, Q.T, out_dtype="int8"),
        "out_dtype must be float32, float64, float16 or bfloat16, got 'int8'",
    ),
    "out_dtype of linear": (
        lambda: breccia.linear(X, Q, out_dtype=5),
        "out_dtype must be float32, float64, float16 or bfloat16, got 5",
    ),
    "dtype": (
        lambda: breccia.dequantize(Q, "int8"),
        "dtype must be float32, float64, float16 or bfloat16, got 'int8'",
    ),
    "w": (lambda: breccia.linear(X, None), "w must be a ScaledTensor or an array, got NoneType"),
    "seed": (
        lambda: breccia.cast(X, "fp8", seed=3),
        "seed must be None for rounding='nearest', which draws nothing, got 3",
    ),
    "recipe": (lambda: breccia.cast(X, "qq"), f"recipe must be the name of a recipe, got 'qq': known are {NAMES}"),
    "a name begun": (
        lambda: breccia.cast(X, "mx"),
        "recipe must be the name of a recipe, got 'mx': did you mean mxfp8 or mxfp6 or mxfp4?",
    ),
    "new_recipe": (
        lambda: breccia.requantize(Q, "nvfp5"),
        "new_recipe must be the name of a recipe, got 'nvfp5': did you mean nvfp4?",
    ),
    "recipes": (
        lambda: autograd.linear(X, X, None, "fp8"),
        "recipes must be a LinearRecipes, such as LinearRecipes.fp8(), got 'fp8'",
    ),
    "fields": (
        lambda: recipes.from_dict("nvfp4"),
        "fields must be a mapping, as recipe.to_dict() makes, got 'nvfp4'",
    ),
    "a field": (
        lambda: recipes.from_dict({"name": "nvfp4", "block": 32}),
        "fields must be those of NVFP4BlockScaling, which has no block",
    ),
    "bias": (
        lambda: autograd.linear(X, X, "b"),
        "bias must be (8,) for w of shape (8, 256), got str",
    ),
    "hadamard": (
        lambda: autograd.LinearRecipes("fp8", "fp8", "fp8", hadamard=16),
        "hadamard must be a breccia.Hadamard or None, got int",
    ),
    "stochastic": (
        lambda: autograd.LinearRecipes("fp8", "fp8", "fp8", stochastic=1),
        "stochastic must be True or False, got 1",
    ),
    "seed of Hadamard": (lambda: breccia.Hadamard(16, seed="a"), "seed must be an integer, got 'a'"),
    "state": (
        lambda: delayed.update(5, breccia.DelayedScaling()),
        "state must be an AmaxHistory, which init makes, got int",
    ),
    "state to record": (
        lambda: delayed.record(None, X),
        "state must be an AmaxHistory, which init makes, got NoneType",
    ),
    "x of experts": (
        lambda: breccia.grouped_matmul("x", breccia.stack([Q]), [0, 1]),
        "x must be a ScaledTensor or an array, got str",
    ),
    "n_values": (lambda: breccia.formats.unpack(Q.data, "9"), "n_values must be an integer, got '9'"),
    "data": (lambda: breccia.PerTensor().validate(5, X), "data must be array-like with .shape, got int"),
    "axis": (lambda: breccia.concatenate([Q], axis="0"), "axis must be an integer, got '0'"),
    "metadata": (
        lambda: breccia.save({"w": Q}, "never", metadata={"by": 5}),
        "metadata must map strings to strings, got 'by': 5",
    ),
    "concatenate": (lambda: breccia.concatenate(Q), "tensors must be a list of ScaledTensors, got ScaledTensor"),
    "stack": (lambda: breccia.stack(5), "tensors must be a list of ScaledTensors, got int"),
    "reshape": (lambda: Q.reshape("a"), "shape must be integers or a tuple of them, got 'a'"),
    "half a block": (
        lambda: Q[:, :8],
        "an index of axis -1 must be a slice of whole blocks of 16, or end with the axis, got :8",
    ),
    "every second block": (
        lambda: Q[:, 0:64:2],
        "an index of axis -1 must be a slice of whole blocks of 16, or end with the axis, got 0:64:2",
    ),
    "save": (lambda: breccia.save({"w": Q}, 5), f"path {PATH}"),
    "save a number": (lambda: breccia.save({5: Q}, "never"), "tensors must map names to ScaledTensors, got the key 5"),
    "save_arrays": (lambda: checkpoint.save_arrays([X], "never"), "arrays must map names to arrays, got list"),
    "save_arrays of lists": (
        lambda: checkpoint.save_arrays({"w": [1]}, "never"),
        "arrays must map names to arrays, got 'w': list",
    ),
    "load": (lambda: breccia.load(5), f"path {PATH}"),
    "open": (lambda: breccia.open(5), f"path {PATH}"),
    "inspect": (lambda: checkpoint.inspect(5), f"path {PATH}"),
    "source": (lambda: checkpoint.convert(5, "never", "nvfp4"), f"source {PATH}"),
    "destination": (lambda: checkpoint.convert("none", 5, "nvfp4"), f"destination {PATH}"),
    "adapter": (lambda: checkpoint.merge_lora("none", 5, "never"), f"adapter {PATH}"),
    "out": (lambda: checkpoint.plot("none", 5), f"out {PATH}"),
    "top": (lambda: checkpoint.plot("none", "never.html", top=0), "top must be 1 or more, got 0"),
    "parts": (lambda: checkpoint.plan("none", "never", "nvfp4", "2"), "parts must be an integer, got '2'"),
    "no parts": (lambda: checkpoint.plan("none", "never", "nvfp4", 0), "parts must be 1 or more, got 0"),
    "to": (
        lambda: checkpoint.convert("none", "never", 5),
        "to must be the name of a recipe or a format, such as 'nvfp4', got 5",
    ),
    "unknown to": (
        lambda: checkpoint.convert("none", "never", "zzz"),
        f"--to must be a recipe or a format, got 'zzz': known are bf16, fp16, fp32, {NAMES} and "
        f"{len(checkpoint.target_names()) - 16} more ('breccia convert --to list' has all)",
    ),
    "include": (
        lambda: checkpoint.convert("none", "never", "nvfp4", include="*"),
        "include must be a list of patterns, as ['*.q_proj.weight'], got '*'",
    ),
    "exclude": (
        lambda: checkpoint.convert("none", "never", "nvfp4", exclude=[5]),
        "exclude must be a list of patterns, as ['*.q_proj.weight'], got 5 in it",
    ),
    "min_sqnr_db": (
        lambda: checkpoint.verify("none", "none", min_sqnr_db="12"),
        "min_sqnr_db must be a number of decibels, got '12'",
    ),
    "GPTQ without zero points": (
        lambda: bridges.to_gptq(UNSIGNED),
        f"scaled must be signed or have zero points for version 'gptq', got {INT4}",
    ),
    "GPTQ of FP8": (
        lambda: bridges.to_gptq(breccia.cast(X, "fp8")),
        f"scaled must be INT4Scaling, or INT8Scaling with its columns in order, got {FP8}",
    ),
    "MLX of columns": (
        lambda: bridges.to_mlx(OUTSIDE),
        f"scaled must have a bias and its columns in order, for MLX stores no g_idx, got {SHOWN}",
    ),
    "Q4_1 of columns": (
        lambda: bridges.to_gguf(OUTSIDE),
        f"scaled must have a bias for 32 elements and its columns in order for Q4_1, got {SHOWN}",
    ),
    "AWQ of columns": (lambda: bridges.to_awq(OUTSIDE), "scaled must be a ScaledTensor, got OutsideTensor"),
    "block_k": (
        lambda: bridges.from_deepseek_v3(Q.data, np.ones((1, 1), np.float32), block_k="128"),
        "block_k must be an integer, got '128'",
    ),
}


@pytest.mark.parametrize(("call", "sentence"), MESSAGES.values(), ids=MESSAGES.keys())
def test_messages(call, sentence):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(sentence)}$"):
        call()


BRIDGES = [name for name in dir(bridges) if name.startswith(("to_", "from_"))]


@pytest.mark.parametrize("name", [name for name in BRIDGES if name.startswith("to_")])
def test_bridges_refuse_what_is_no_scaled_tensor(name):
    with pytest.raises((TypeError, ImportError), match=r"scaled must be a ScaledTensor, got ndarray$|is needed here"):
        getattr(bridges, name)(X)


@pytest.mark.parametrize("name", [name for name in BRIDGES if name.startswith("from_")])
def test_bridges_refuse_what_is_no_mapping_of_tensors(name):
    function = getattr(bridges, name)
    if "parts" not in function.__code__.co_varnames[:1]:
        pytest.skip("takes arrays")
    with pytest.raises(TypeError, match=r"^[\w-]+: parts must map names to tensors, got int$"):
        function(5)


def test_a_checkpoint_asked_by_number(tmp_path):
    breccia.save({"w": Q}, tmp_path / "w.safetensors")
    with pytest.raises(TypeError, match=r"^name must be that of a tensor, a string, got 0$"):
        breccia.open(tmp_path / "w.safetensors")[0]


def test_a_filter_that_is_no_function():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    with pytest.raises(TypeError, match=r"^filter must be a function of a module and its name, or None, got 'x'$"):
        breccia.quantize_(model, "nvfp4", "x")
    with pytest.raises(
        ValueError, match=r"^activations must be the name of a recipe, got 'nvfp5': did you mean nvfp4\?$"
    ):
        breccia.quantize_(model, "nvfp4", activations="nvfp5")
    assert type(model[0]) is torch.nn.Linear


def test_layers_of_torch_say_what_they_take():
    torch = pytest.importorskip("torch")
    from breccia import nn

    weight = Q.to("torch")
    told = {
        "weight must be a 2-D ScaledTensor of torch tensors, got ndarray": lambda: nn.QuantizedLinear(X),
        "bias must be a torch tensor of shape (8,) or None, got shape (3,)": lambda: nn.QuantizedLinear(
            weight, torch.ones(3)
        ),
        "recipes must be a LinearRecipes, such as LinearRecipes.fp8(), got 'fp8'": lambda: nn.ScaledLinear(
            64, 32, recipes="fp8"
        ),
        "shape must be a tuple of integers, got 5": lambda: breccia.distributed.plan(5, "nvfp4", 2),
        "world must be an integer, got '2'": lambda: breccia.distributed.plan((64, 64), "nvfp4", "2"),
    }
    for sentence, call in told.items():
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(sentence)}$"):
            call()


def test_python_suggests_public_names():
    command = [sys.executable, "-c", "import breccia; breccia.quantise_"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Did you mean: 'quantize_'?" in run.stderr
