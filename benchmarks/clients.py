# SPDX-License-Identifier: Apache-2.0
"""Which program loads what `breccia convert` writes, and whether its logits are those of the quantized values.

    python benchmarks/clients.py [target …]   # writes benchmarks/results/clients.json; make_docs.py makes the table

Every target is written for a tiny model with random weights, some for further models ("nvfp4, gpt-oss"), and opened by
the client's own loader. Logits are compared with those of the same checkpoint converted to bfloat16, or to float32
where the client computes in it, as a part of their norm.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "clients.json"
EQUAL = 0.02  # of the logits' norm: bfloat16 activations through two layers, rounded in another order
TOKENS = range(3, 43)
PACKAGES = (
    "accelerate",
    "amd-quark",
    "comfy-kitchen",
    "compressed-tensors",
    "gguf",
    "gptqmodel",
    "mlx-lm",
    "onnx",
    "torch",
    "torchao",
    "transformers",
)


def _is_there(*names: str) -> bool:
    return all(importlib.util.find_spec(name) is not None for name in names)


def _transformers(path: Path, dtype: str = "bfloat16", **options: Any) -> Any:
    import torch
    import transformers

    loader = transformers.AutoModelForCausalLM
    model, info = loader.from_pretrained(path, dtype=dtype, output_loading_info=True, **options)
    missing = sorted(info["missing_keys"]) + sorted(info["mismatched_keys"])
    if missing:
        raise ValueError(f"weights are not found: {missing[0]}")
    for module in model.modules():
        if type(module).__name__ in ("QuantizedLinear", "StackedLinear"):
            module.activations = None  # what is compared are weights
    with torch.no_grad():
        return model.eval()(torch.tensor([list(TOKENS)])).logits.float()


def _dequantized(path: Path) -> Any:
    import transformers

    return _transformers(path, quantization_config=transformers.CompressedTensorsConfig(dequantize=True))


def _with_breccia(path: Path) -> Any:
    import breccia.transformers  # noqa: F401 (registers)

    return _transformers(path, "float32")


def _gguf(path: Path) -> Any:
    return _transformers(path.parent, gguf_file=path.name)


def _mlx_lm(path: Path) -> Any:
    import mlx.core as mx
    import mlx_lm.utils as mlx_lm
    import numpy as np
    import torch

    model, _ = mlx_lm.load_model(path)
    model.set_dtype(mx.float32)
    return torch.from_numpy(np.array(model(mx.array([list(TOKENS)])).astype(mx.float32)))


def _comfy_kitchen(path: Path) -> Any:
    """The model in float32, each quantized weight as the values that ComfyUI's layouts make of it."""
    import torch
    from comfy_kitchen import tensor as kitchen
    from safetensors.torch import load_file

    state = load_file(next(path.glob("*.safetensors")))
    for name in [name for name in state if name.endswith(".comfy_quant")]:
        layer = name.removesuffix("comfy_quant")
        said = json.loads(bytes(state.pop(name).tolist()))["format"]
        weight, scale, second = (state.pop(layer + role, None) for role in ("weight", "weight_scale", "weight_scale_2"))
        options: dict[str, Any] = {"scale": scale, "orig_dtype": torch.float32, "orig_shape": tuple(weight.shape)}
        if said == "nvfp4":
            layout, options = kitchen.TensorCoreNVFP4Layout, {**options, "scale": second, "block_scale": scale}
        elif said == "mxfp8":
            layout, options = kitchen.TensorCoreMXFP8Layout, {**options, "scale": scale.view(torch.float8_e8m0fnu)}
        else:
            layout = kitchen.TensorWiseINT8Layout if said == "int8_tensorwise" else kitchen.TensorCoreFP8Layout
        state[layer + "weight"] = layout.dequantize(weight, layout.Params(**options))
    return _of_state(state, path)


def _of_state(state: dict[str, Any], config: Path) -> Any:
    """Logits of the model in float32 with these weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.float32)
    missing = model.load_state_dict(state, strict=False).missing_keys
    if set(missing) - {"lm_head.weight"}:
        raise ValueError(f"weights are not found: {missing[0]}")
    model.tie_weights()
    with torch.no_grad():
        return model.eval()(torch.tensor([list(TOKENS)])).logits


def _onnx(path: Path) -> Any:
    """The model in float32 with the weights that onnx's evaluator makes of the graph."""
    import numpy as np
    import onnx
    import torch
    from onnx.reference import ReferenceEvaluator

    model = onnx.load(path)
    made = ReferenceEvaluator(model).run(None, {})
    names = [one.name for one in model.graph.output]
    state = {name: torch.from_numpy(np.asarray(one, np.float32)) for name, one in zip(names, made, strict=True)}
    return _of_state(state, path.parent)


def quarks_own(name: str) -> Any:
    """A class of quark.torch.utils.pack, of its source: the package imports much that packing does not need."""
    import torch

    found = importlib.util.find_spec("quark")
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("amd-quark is not installed", name="quark")
    source = (Path(found.submodule_search_locations[0]) / "torch" / "utils" / "pack.py").read_text()
    wanted = [node for node in ast.parse(source).body if getattr(node, "name", "") in ("PackMethod", name)]
    classes: dict[str, Any] = {"torch": torch}
    exec("from __future__ import annotations\n" + "\n".join(map(ast.unparse, wanted)), classes)
    return classes[name]


def _quark(path: Path) -> Any:
    """The model in float32, each quantized weight as the values of the codes that Quark's packing finds in it."""
    import torch
    from safetensors.torch import load_file

    said = json.loads((path / "config.json").read_text())["quantization_config"]["global_quant_config"]["weight"]
    pack = quarks_own("Pack_4_bits")(said["qscheme"], said["dtype"])
    state = load_file(next(path.glob("*.safetensors")))
    for name in [name for name in state if name.endswith(".weight_scale")]:
        layer = name.removesuffix("weight_scale")
        weight, scale, zero = (
            state.pop(layer + role, None) for role in ("weight", "weight_scale", "weight_zero_point")
        )
        if weight.dtype == torch.int32:
            codes, scale = pack.unpack(weight, True).float(), scale.float().T
            size = codes.shape[1] // scale.shape[1]
            middle = 0.0 if zero is None else pack.unpack(zero, True).float().repeat_interleave(size, 1)
            state[f"{layer}weight"] = (codes - middle) * scale.repeat_interleave(size, 1)
            continue
        for axis, each in enumerate(said.get("block_size") or ()):
            scale = scale.repeat_interleave(each, axis).narrow(axis, 0, weight.shape[axis])
        scale = scale[:, None] if scale.ndim == 1 else scale
        state[f"{layer}weight"] = weight.float() * scale
    return _of_state(state, path)


# A client: how the table names it, what must be importable, how it gives logits.
Client = tuple[str, tuple[str, ...], Callable[[Path], Any]]
PLAIN: Client = ("transformers", ("transformers",), _transformers)
CLIENTS: dict[str, Client] = {
    "awq": ("transformers with GPTQModel", ("transformers", "gptqmodel"), _transformers),
    "breccia": ("transformers with `breccia.transformers`", ("transformers",), _with_breccia),
    "comfyui": ("comfy-kitchen's layouts", ("transformers", "comfy_kitchen"), _comfy_kitchen),
    "compressed-tensors": (
        "transformers with compressed-tensors",
        ("transformers", "compressed_tensors"),
        _transformers,
    ),
    "compressed-tensors:fp8-block": (
        "transformers, `CompressedTensorsConfig(dequantize=True)`",
        ("transformers", "compressed_tensors"),
        _dequantized,
    ),
    "compressed-tensors:int4-asym": (
        "transformers, `CompressedTensorsConfig(dequantize=True)`",
        ("transformers", "compressed_tensors"),
        _dequantized,
    ),
    "deepseek": ("transformers", ("transformers", "accelerate"), _transformers),
    "gguf": ("transformers, `gguf_file=`", ("transformers", "gguf"), _gguf),
    "gpt-oss": ("transformers", ("transformers", "accelerate"), _transformers),
    "gptq": ("transformers with GPTQModel", ("transformers", "gptqmodel", "optimum"), _transformers),
    "mlx": ("mlx-lm", ("mlx_lm",), _mlx_lm),
    "modelopt": ("transformers with `breccia.transformers`", ("transformers",), _with_breccia),
    "onnx": ("onnx's evaluator", ("transformers", "onnx"), _onnx),
    "quark": ("AMD Quark's packing", ("transformers", "quark"), _quark),
    "torchao": ("transformers with torchao", ("transformers", "torchao"), _transformers),
}


# Further models of targets: experts in tensors of their own, and in one.
EXPERTS = ("qwen3-moe", "gpt-oss", "llama4", "granite-moe")
MORE = [f"{target}, {model}" for target in ("nvfp4", "mxfp4", "int8") for model in EXPERTS]
# Formats for models of all kinds, whose readers have rules of their own for experts.
WITH_EXPERTS = ("compressed-tensors", "deepseek", "mlx", "modelopt", "torchao")

# Clients that compute with other values than the file has, and why.
WRONG = {
    "compressed-tensors:nvfp4, qwen3-moe": "transformers leaves out `weight_global_scale` of experts, without a message"
}


def rows_of() -> list[str]:
    """Every row of the table: each target, and after them those with further models."""
    every = targets()
    return [*every, *MORE, *(f"{name}, qwen3-moe" for name in every if name.partition(":")[0] in WITH_EXPERTS)]


def targets() -> list[str]:
    """Every target with its recipe, once: what `breccia convert --to list` names."""
    from breccia.checkpoint import target_names
    from breccia.recipe_names import names

    formats = {name.partition(":")[0] for name in target_names() if ":" in name}
    return [name for name in target_names() if name not in formats and name not in _aliases(names())]


def _aliases(names: list[str]) -> set[str]:
    """Names of the same recipe as another one."""
    from breccia.recipe_names import recipe_of

    seen: dict[Any, str] = {}
    return {name for name in names if seen.setdefault(recipe_of(name), name) != name}


def client_of(row: str) -> Client:
    """Who opens a row's target."""
    target = row.partition(", ")[0]
    if target in ("bf16", "fp16", "fp32"):
        return PLAIN
    name = target.partition(":")[0]
    return CLIENTS.get(target) or CLIENTS.get(name) or CLIENTS["breccia"]


def model_for(row: str) -> str:
    """The tiny model that a row's target is written for."""
    target, _, model = row.partition(", ")
    if model:
        return model
    if target.startswith("gpt-oss"):
        return "gpt-oss"
    if target.startswith("gguf") and target.endswith("_k"):
        return "llama-wide"
    return "llama-tied"


def check(row_name: str, source: Path, folder: Path) -> dict[str, Any]:
    """One row: what the client made of a target, "error" of the logits, why they are "wrong" or why it "fails".

    Raises:
        ModuleNotFoundError: the client is not installed.
    """
    from breccia.checkpoint import convert
    from breccia.checkpoint.planning.choices import QUANTIZED
    from breccia.checkpoint.planning.targets import parse_target

    target = row_name.partition(", ")[0]
    name, needs, logits = client_of(target)
    if not _is_there(*needs):
        raise ModuleNotFoundError(f"{target} needs {', '.join(needs)}", name=needs[-1])
    row: dict[str, Any] = {"target": row_name, "client": name, "model": model_for(row_name)}
    out = folder / ("model.gguf" if target.startswith("gguf") else "q")
    try:
        report = convert(source, out, target)
    except ValueError as error:
        return {**row, "refused": str(error)[:200]}
    quantized = any(action in QUANTIZED for action in report["tensors"])
    if not quantized and not parse_target(target).quantizes_nothing:
        return {**row, "fails": "no tensor of this model has a place in the format"}
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        if out.is_file():
            for file in source.glob("*.json"):
                if "index" not in file.name:
                    (folder / file.name).write_bytes(file.read_bytes())
        exact = logits in (_with_breccia, _mlx_lm, _comfy_kitchen, _onnx, _quark)
        floats = _floats(out, source, folder, "fp32" if exact else "bf16")
        try:
            found = logits(out)
        except ModuleNotFoundError:
            raise
        except Exception as error:
            return {**row, "fails": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"[:200]}
        wanted = _transformers(floats, "float32" if exact else "bfloat16")
        error = float((found - wanted).norm() / wanted.norm())
    if row_name in WRONG and not error <= 0.5:
        return {**row, "wrong": WRONG[row_name]}
    return {**row, "error": round(error, 6) if error == error else None}


def _floats(out: Path, source: Path, folder: Path, dtype: str) -> Path:
    from breccia.checkpoint import convert

    floats = folder / "floats"
    if out.is_file():
        floats.mkdir()
        convert(out, floats / "model.safetensors", dtype)
        (floats / "config.json").write_bytes((source / "config.json").read_bytes())
    else:
        convert(out, floats, dtype)
    return floats


def main() -> int:
    sys.path[:0] = [str(ROOT / "tests_py")]
    from tiny_models import tiny

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="run these alone, or all; the rows of others stay")
    chosen = parser.parse_args().targets or rows_of()
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"versions": {}, "rows": []}
    rows = {row["target"]: row for row in before["rows"]}
    with tempfile.TemporaryDirectory() as name:
        for target in chosen:
            source = Path(name) / model_for(target)
            if not source.exists():
                tiny(source.name, source)
            folder = Path(name) / target.replace(":", "-").replace(", ", "-")
            folder.mkdir()
            try:
                rows[target] = check(target, source, folder)
            except ModuleNotFoundError as error:
                print(f"left as it was: {error}", flush=True)
                continue
            print(rows[target], flush=True)
    kept = [rows[target] for target in rows_of() if target in rows]
    versions = dict(sorted({**before["versions"], **_versions()}.items()))
    RESULTS.write_text(json.dumps({"versions": versions, "rows": kept}, indent=1) + "\n")
    return 0


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name).partition("+")[0]
    return found


if __name__ == "__main__":
    sys.exit(main())
