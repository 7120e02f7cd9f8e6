# SPDX-License-Identifier: Apache-2.0
"""What a mistake is answered with, to the last word: the argument, what it was, what it must be. Those of
verbs are in messages_of_verbs.py, those that need a file or a framework in test_messages.py."""

import breccia
import cases
import numpy as np
from breccia import autograd, bridges, checkpoint, delayed, recipes
from breccia.bridges import OutsideTensor, load_safetensors, save_safetensors

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
NAMES = (
    "delayed, current, block, expanded, mxfp8, mxfp6, mxfp4, nvfp4, int4, int8, int8_expanded, fp8, fp8-row, "
    "fp8-block, fp8-row-block"
)
SOME_NAMES = ", ".join(NAMES.split(", ")[:13])

MESSAGES = {
    "out_dtype": (
        TypeError,
        lambda: breccia.matmul(X, Q.T, out_dtype="int8"),
        "out_dtype must be float32, float64, float16 or bfloat16, got 'int8'",
    ),
    "out_dtype of linear": (
        TypeError,
        lambda: breccia.linear(X, Q, out_dtype=5),
        "out_dtype must be float32, float64, float16 or bfloat16, got 5",
    ),
    "dtype": (
        TypeError,
        lambda: breccia.dequantize(Q, "int8"),
        "out_dtype must be float32, float64, float16 or bfloat16, got 'int8'",
    ),
    "w": (TypeError, lambda: breccia.linear(X, None), "w must be a ScaledTensor or an array, got NoneType"),
    "seed": (
        ValueError,
        lambda: breccia.cast(X, "fp8", seed=3),
        "seed must be None for rounding='nearest', which draws nothing, got 3",
    ),
    "recipe": (
        ValueError,
        lambda: breccia.cast(X, "qq"),
        f"recipe must be the name of a recipe, got 'qq': known are {NAMES}",
    ),
    "a name begun": (
        ValueError,
        lambda: breccia.cast(X, "mx"),
        "recipe must be the name of a recipe, got 'mx': did you mean mxfp8 or mxfp6 or mxfp4?",
    ),
    "new_recipe": (
        ValueError,
        lambda: breccia.requantize(Q, "nvfp5"),
        "new_recipe must be the name of a recipe, got 'nvfp5': did you mean nvfp4?",
    ),
    "recipes": (
        TypeError,
        lambda: autograd.linear(X, X, None, "fp8"),
        "recipes must be a LinearRecipes, such as LinearRecipes.fp8(), got 'fp8'",
    ),
    "fields": (
        TypeError,
        lambda: recipes.from_dict("nvfp4"),
        "fields must be a mapping, as recipe.to_dict() makes, got 'nvfp4'",
    ),
    "a field": (
        TypeError,
        lambda: recipes.from_dict({"name": "nvfp4", "block": 32}),
        "fields must be those of NVFP4BlockScaling, which has no block",
    ),
    "bias": (
        ValueError,
        lambda: autograd.linear(X, X, "b"),
        "bias must be (8,) for w of shape (8, 256), got str",
    ),
    "hadamard": (
        TypeError,
        lambda: autograd.LinearRecipes("fp8", "fp8", "fp8", hadamard=16),
        "hadamard must be a breccia.Hadamard or None, got int",
    ),
    "stochastic": (
        TypeError,
        lambda: autograd.LinearRecipes("fp8", "fp8", "fp8", stochastic=1),
        "stochastic must be True or False, got 1",
    ),
    "seed of Hadamard": (TypeError, lambda: breccia.Hadamard(16, seed="a"), "seed must be an integer, got 'a'"),
    "state": (
        TypeError,
        lambda: delayed.update(5, breccia.DelayedScaling()),
        "state must be an AmaxHistory, which init makes, got int",
    ),
    "state to record": (
        TypeError,
        lambda: delayed.record(None, X),
        "state must be an AmaxHistory, which init makes, got NoneType",
    ),
    "x of experts": (
        TypeError,
        lambda: breccia.grouped_matmul("x", breccia.stack([Q]), [0, 1]),
        "x must be a ScaledTensor or an array, got str",
    ),
    "n_values": (TypeError, lambda: breccia.formats.unpack(Q.data, "9"), "n_values must be an integer, got '9'"),
    "data": (TypeError, lambda: breccia.PerTensor().validate(5, X), "data must be array-like with .shape, got int"),
    "axis": (TypeError, lambda: breccia.concatenate([Q], axis="0"), "axis must be an integer, got '0'"),
    "metadata": (
        TypeError,
        lambda: breccia.save({"w": Q}, "never", metadata={"by": 5}),
        "metadata must map strings to strings, got 'by': 5",
    ),
    "concatenate": (
        TypeError,
        lambda: breccia.concatenate(Q),
        "tensors must be a list of ScaledTensors, got ScaledTensor",
    ),
    "stack": (TypeError, lambda: breccia.stack(5), "tensors must be a list of ScaledTensors, got int"),
    "reshape": (TypeError, lambda: Q.reshape("a"), "shape must be integers or a tuple of them, got 'a'"),
    "half a block": (
        ValueError,
        lambda: Q[:, :8],
        "an index of axis -1 must be a slice of whole blocks of 16, or end with the axis, got :8",
    ),
    "every second block": (
        ValueError,
        lambda: Q[:, 0:64:2],
        "an index of axis -1 must be a slice of whole blocks of 16, or end with the axis, got 0:64:2",
    ),
    "save": (TypeError, lambda: breccia.save({"w": Q}, 5), f"path {PATH}"),
    "save a number": (
        TypeError,
        lambda: breccia.save({5: Q}, "never"),
        "tensors must map names to ScaledTensors, got the key 5",
    ),
    "save_arrays": (
        TypeError,
        lambda: checkpoint.save_arrays([X], "never"),
        "arrays must map names to arrays, got list",
    ),
    "save_arrays of lists": (
        TypeError,
        lambda: checkpoint.save_arrays({"w": [1]}, "never"),
        "arrays must map names to arrays, got 'w': list",
    ),
    "load": (TypeError, lambda: breccia.load(5), f"path {PATH}"),
    "open": (TypeError, lambda: breccia.open(5), f"path {PATH}"),
    "inspect": (TypeError, lambda: checkpoint.inspect(5), f"path {PATH}"),
    "source": (TypeError, lambda: checkpoint.convert(5, "never", "nvfp4"), f"source {PATH}"),
    "destination": (TypeError, lambda: checkpoint.convert("none", 5, "nvfp4"), f"destination {PATH}"),
    "adapter": (TypeError, lambda: checkpoint.merge_lora("none", 5, "never"), f"adapter {PATH}"),
    "out": (TypeError, lambda: checkpoint.report("none", 5), f"out {PATH}"),
    "parts": (TypeError, lambda: checkpoint.plan("none", "never", "nvfp4", "2"), "parts must be an integer, got '2'"),
    "no parts": (ValueError, lambda: checkpoint.plan("none", "never", "nvfp4", 0), "parts must be 1 or more, got 0"),
    "to": (
        TypeError,
        lambda: checkpoint.convert("none", "never", 5),
        "to must be the name of a recipe or a format, such as 'nvfp4', got 5",
    ),
    "unknown to": (
        ValueError,
        lambda: checkpoint.convert("none", "never", "zzz"),
        f"to must be a recipe or a format, got 'zzz': known are bf16, fp16, fp32, {SOME_NAMES} and "
        f"{len(checkpoint.target_names()) - 16} more ('breccia convert --to list' has all)",
    ),
    "include": (
        TypeError,
        lambda: checkpoint.convert("none", "never", "nvfp4", include="*"),
        "include must be a list of patterns, as ['*.q_proj.weight'], got '*'",
    ),
    "exclude": (
        TypeError,
        lambda: checkpoint.convert("none", "never", "nvfp4", exclude=[5]),
        "exclude must be a list of patterns, as ['*.q_proj.weight'], got 5 in it",
    ),
    "min_sqnr_db": (
        TypeError,
        lambda: checkpoint.verify("none", "none", min_sqnr_db="12"),
        "min_sqnr_db must be a number of decibels, got '12'",
    ),
    "GPTQ without zero points": (
        ValueError,
        lambda: bridges.to_gptq(UNSIGNED),
        f"scaled must be signed or have zero points for version 'gptq', got {INT4}",
    ),
    "GPTQ of FP8": (
        ValueError,
        lambda: bridges.to_gptq(breccia.cast(X, "fp8")),
        f"scaled must be INT4Scaling, or INT8Scaling with its columns in order, got {FP8}",
    ),
    "MLX of columns": (
        ValueError,
        lambda: bridges.to_mlx(OUTSIDE),
        f"scaled must have a bias and its columns in order, for MLX stores no g_idx, got {SHOWN}",
    ),
    "Q4_1 of columns": (
        ValueError,
        lambda: bridges.to_gguf(OUTSIDE),
        f"scaled must have a bias for 32 elements and its columns in order for Q4_1, got {SHOWN}",
    ),
    "AWQ of columns": (TypeError, lambda: bridges.to_awq(OUTSIDE), "scaled must be a ScaledTensor, got OutsideTensor"),
    "block_k": (
        TypeError,
        lambda: bridges.from_deepseek_v3(Q.data, np.ones((1, 1), np.float32), block_k="128"),
        "block_k must be an integer, got '128'",
    ),
    "bias of another length": (
        ValueError,
        lambda: breccia.linear(X, Q, X[0, :3]),
        "bias must be (8,) for w of shape (8, 256), got shape (3,)",
    ),
    "matrix bias": (
        ValueError,
        lambda: breccia.linear(X, Q, np.ones((2, 8), np.float32)),
        "bias must be (8,) for w of shape (8, 256), got shape (2, 8)",
    ),
    "bias of text": (
        ValueError,
        lambda: breccia.linear(X, Q, "b"),
        "bias must be (8,) for w of shape (8, 256), got str",
    ),
    "linear": (
        ValueError,
        lambda: breccia.linear(X[:2, :100], Q),
        "x must be (..., 256) for w of shape (8, 256), got shape (2, 100)",
    ),
    "block_k of a recipe": (
        TypeError,
        lambda: breccia.Float8BlockScaling(block_k=128.0),
        "block_k must be an integer, got 128.0",
    ),
    "block_k of text": (
        TypeError,
        lambda: breccia.Float8BlockScaling(block_k="8"),
        "block_k must be an integer, got '8'",
    ),
    "layout": (TypeError, lambda: breccia.PerBlockK(128.0), "block_size must be an integer, got 128.0"),
    "threads": (TypeError, lambda: breccia.set_num_threads(1.5), "count must be an integer, got 1.5"),
    "packed scale": (
        ValueError,
        lambda: breccia.from_buffer(Q.data, Q.scale[:, :3], Q.recipe, Q.layout, global_scale=Q.global_scale),
        "PerBlockMN: scale.shape must be (8, 16) for data of shape (8, 128) with two codes per byte, or (8, 8) with "
        "one, got (8, 3)",
    ),
    "to another framework": (
        ValueError,
        lambda: Q.to("pytorch"),
        "target must be 'numpy', 'torch', 'jax', 'mlx' or 'cpu' for NumPy arrays, got 'pytorch'",
    ),
    "load to another framework": (
        ValueError,
        lambda: load_safetensors("none", "pytorch"),
        "framework must be one of 'numpy', 'torch', 'jax', 'mlx', got 'pytorch'",
    ),
    "save of one tensor": (
        TypeError,
        lambda: save_safetensors(Q, "none"),
        "tensors must map names to ScaledTensors, as {'weight': q}, got ScaledTensor",
    ),
}
