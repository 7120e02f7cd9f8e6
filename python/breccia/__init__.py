# SPDX-License-Identifier: Apache-2.0
"""Block-scaled low-precision tensors whose scale, recipe and layout travel with the data."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from breccia import _moved, autograd, delayed, formats, frameworks, kernels, layouts, recipes
from breccia._version import __version__
from breccia.autograd import cast_ste, cast_ste_clipped
from breccia.calibration import calibrate
from breccia.calibration.error_feedback import gptq
from breccia.comparison import compare
from breccia.device import cpu_info, gpu_info, num_threads, set_backend, set_num_threads
from breccia.evaluation import evaluate
from breccia.io import load, load_scheme, save
from breccia.io import open as open  # noqa: A004 (breccia.open)
from breccia.layouts import Layout, PerBlockK, PerBlockMN, PerChannel, PerTensor
from breccia.peers import require
from breccia.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8ExpandedScaling,
    INT4Scaling,
    INT8ExpandedScaling,
    INT8Scaling,
    MXFP4BlockScaling,
    MXFP6BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    ScalingRecipe,
)
from breccia.scaled_tensor import ScaledTensor, from_buffer
from breccia.value.joining import concatenate, stack
from breccia.verbs import cast, dequantize, linear, matmul, requantize
from breccia.verbs.cast_options import Hadamard
from breccia.verbs.grouped import grouped_matmul
from breccia.verbs.low_rank import lora_init
from breccia.verbs.packed import PackedWeight, pack
from breccia.verbs.prepared import PreparedWeight, prepare
from breccia.verbs.quantize_model import quantize_, quantize_layer
from breccia.verbs.saved_activations import checkpoint_activations
from breccia.verbs.transposing import Transposed, transpose

if TYPE_CHECKING:  # what `_LAZY`, `_LAZY_NAMES` and `_moved.RENAMED` have
    from breccia import bridges as bridges
    from breccia import checkpoint as checkpoint
    from breccia import diffusers as diffusers
    from breccia import distributed as distributed
    from breccia import dlpack as dlpack
    from breccia import nn as nn
    from breccia import optim as optim
    from breccia import peft as peft
    from breccia import schemes as schemes
    from breccia import sglang as sglang
    from breccia import sharding as sharding
    from breccia import transformers as transformers
    from breccia import vllm as vllm
    from breccia.schemes import ModelScheme as ModelScheme

    scheme, quantize = load_scheme, quantize_layer

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8ExpandedScaling",
    "Hadamard",
    "INT4Scaling",
    "INT8ExpandedScaling",
    "INT8Scaling",
    "Layout",
    "MXFP4BlockScaling",
    "MXFP6BlockScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
    "PackedWeight",
    "PerBlockK",
    "PerBlockMN",
    "PerChannel",
    "PerTensor",
    "PreparedWeight",
    "ScaledTensor",
    "ScalingRecipe",
    "Transposed",
    "__version__",
    "autograd",
    "calibrate",
    "cast",
    "cast_ste",
    "cast_ste_clipped",
    "checkpoint_activations",
    "compare",
    "concatenate",
    "cpu_info",
    "delayed",
    "dequantize",
    "evaluate",
    "formats",
    "from_buffer",
    "gptq",
    "gpu_info",
    "grouped_matmul",
    "kernels",
    "layouts",
    "linear",
    "load",
    "load_scheme",
    "lora_init",
    "matmul",
    "num_threads",
    "pack",
    "prepare",
    "quantize_",
    "quantize_layer",
    "recipes",
    "requantize",
    "save",
    "set_backend",
    "set_num_threads",
    "stack",
    "transpose",
]

frameworks.load_imported()
_moved.install()

# Public, but not for ``from breccia import *``, which would hide the built-in.
_NOT_BY_STAR = ("open",)

# Imported on first use, and the peer that each needs: most programs need none of them.
_LAZY = {
    "bridges": "",
    "checkpoint": "",
    "diffusers": "diffusers",
    "distributed": "torch",
    "dlpack": "",
    "nn": "torch",
    "optim": "torch",
    "peft": "peft",
    "schemes": "",
    "sglang": "",
    "sharding": "jax",
    "transformers": "transformers",
    "vllm": "",
}

# Classes of these modules that are called by one name.
_LAZY_NAMES = {"ModelScheme": "schemes"}


if not TYPE_CHECKING:  # to a type checker, a name that is not above is an error

    def __getattr__(name: str) -> Any:
        why = ""
        if name in _moved.MOVED:
            return importlib.import_module(f"breccia.{name}")
        if name in _moved.RENAMED:
            return _moved.renamed(__name__, name)
        if name in _LAZY_NAMES:
            return getattr(importlib.import_module(f"breccia.{_LAZY_NAMES[name]}"), name)
        if name in _LAZY:
            try:
                if _LAZY[name]:
                    require(_LAZY[name], _LAZY[name])
                return importlib.import_module(f"breccia.{name}")
            except ImportError as error:  # hasattr, help and inspect.getmembers take an AttributeError for an answer
                why = f": {error}"
        elif not name.startswith("_"):
            places = (
                module
                for module in ("checkpoint", "moments")
                if name in importlib.import_module(f"breccia.{module}").__all__
            )
            why = "".join(f": it is breccia.{module}.{name}" for module in places)
        raise AttributeError(f"module 'breccia' has no attribute {name!r}{why}", name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return sorted([*__all__, *_NOT_BY_STAR, *_LAZY, *_LAZY_NAMES])
