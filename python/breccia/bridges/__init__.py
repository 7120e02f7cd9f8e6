# SPDX-License-Identifier: Apache-2.0
"""Doors to other libraries' tensors and checkpoint formats: one module each, the same verbs.

``from_<format>`` makes a ScaledTensor of foreign buffers, ``to_<format>`` the reverse; both move bytes
and quantize nothing. Peers are imported when a function needs them: an ImportError names the extra.
docs/formats.md is the map of what each format stores.

The names in the ``__all__`` of every module here are names of this package. `registry` has what each format is, as a
`FileFormat`.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from breccia.bridges.contract import FileFormat
    from breccia.bridges.file_kinds import Container

# The modules of the formats. They are not looked for in the folder: where no file can be opened, that finds none.
_MODULES = (
    "awq",
    "bitsandbytes",
    "comfyui",
    "compressed_tensors",
    "deepseek",
    "dlpack",
    "gguf",
    "gpt_oss",
    "gptq",
    "mlx",
    "modelopt",
    "native",
    "onnx",
    "quark",
    "qwix",
    "torchao",
    "transformer_engine",
)
OWN = "breccia"  # the format of recipes that are named without one
_OTHERS = {
    "file_kinds": ("Container", "Output", "WeightFile"),
    "contract": ("Bridge", "LIKELY", "NAMED", "NO", "FileFormat", "Kind", "Place", "Sample"),
    "fnuz": ("from_fnuz", "to_fnuz"),
    "outside": ("OutsideTensor",),
    "parts": ("Found", "Part"),
    "readers": ("Readers",),
    "registering": ("register", "unregister"),
    "written": ("InputScale", "Written"),
}


@cache
def modules() -> dict[str, ModuleType]:
    """Every bridge, by the name of its format. Raises OSError where a module's file cannot be opened; the next call
    tries again."""
    found = [importlib.import_module(f"{__name__}.{name}") for name in _MODULES]
    return {module.NAME: module for module in found}


def registry() -> dict[str, FileFormat]:
    """Every format, by name: those of this package and those that `register` added."""
    found = dict(_by_name())
    del found[""], found["plain"]
    return found


def bridge(name: str) -> FileFormat:
    """The format of a name; "" and "plain" are that of tensors without codes.

    Args:
        name: as on the command line.

    Returns:
        What the format is.

    Raises:
        KeyError: there is none of that name.
    """
    return _by_name()[name]


@cache
def _by_name() -> dict[str, FileFormat]:
    """What `bridge` looks up, which checkpoints of many tensors ask for each: `register` makes it anew."""
    from breccia.bridges.contract import PLAIN, registered

    own = {module.BRIDGE.name: module.BRIDGE for module in modules().values()}
    return {"": PLAIN, "plain": PLAIN, **own, **registered}


@cache
def containers() -> tuple[Container, ...]:
    """The kinds of files that formats have, the last of which is safetensors: what no other one holds."""
    from breccia.bridges.file_kinds import SAFETENSORS

    every = dict.fromkeys(one.container for one in registry().values())
    every.pop(SAFETENSORS, None)
    return (*every, SAFETENSORS)


@cache
def owned() -> frozenset[str]:
    """Entries of config.json that are no model's but a format's: what an output says by them is its own format's."""
    from breccia.bridges.dialect import PLACES

    return frozenset((*PLACES, *(key for one in registry().values() for key in one.dialect.owns)))


@cache
def config_files() -> tuple[str, ...]:
    """Files beside the weights that say how they are quantized, which this package writes too."""
    files = (one.dialect.file for one in registry().values())
    return ("config.json", *(f"{name}.json" for name in files if name))


@cache
def _home() -> dict[str, ModuleType]:
    homes = {name: module for module in modules().values() for name in module.__all__}
    others = {name: importlib.import_module(f"{__name__}.{home}") for home, names in _OTHERS.items() for name in names}
    return homes | others


def __getattr__(name: str) -> Any:
    if name == "__all__":  # of ``from breccia.bridges import *``
        return [*_home(), "bridge", "registry"]
    if name.startswith("__") or name not in _home():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_home()[name], name)


def __dir__() -> list[str]:
    files = (module.__name__.rpartition(".")[2] for module in modules().values())
    return sorted({"bridge", "modules", "registry", *files, *_home()})
