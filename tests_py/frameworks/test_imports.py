# SPDX-License-Identifier: Apache-2.0
"""`import breccia` costs little and imports no framework."""

import ast
import importlib.util
import pathlib
import pkgutil
import subprocess
import sys

import pytest
from breccia import gguf


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_no_framework_is_imported():
    heavy = "{'torch', 'jax', 'jaxlib', 'mlx', 'ml_dtypes', 'safetensors', 'triton'}"
    assert run(f"import sys, breccia; print({heavy} & sys.modules.keys())").strip() == "set()"
    using = "import numpy as np, breccia; breccia.cast(np.ones((2, 64), 'f4'), breccia.NVFP4BlockScaling())"
    assert run(f"import sys; {using}; print({heavy} & sys.modules.keys())").strip() == "set()"


def test_documented_modules_are_there_after_the_import():
    names = "breccia.dlpack, breccia.bridges, breccia.checkpoint, breccia.kernels.triton, breccia.frameworks.numpy"
    run(f"import breccia; print({names})")
    assert "AttributeError" in run(
        "import breccia.frameworks as f\ntry: f.tensorflow\nexcept AttributeError as e: print(type(e).__name__)"
    )
    pytest.importorskip("torch")
    run("import torch, breccia; print(breccia.nn.QuantizedLinear, breccia.frameworks.torch)")


def test_dir_lists_what_is_public_and_nothing_else():
    code = "import breccia; print(*(n for n in dir(breccia) if n not in breccia.__all__))"
    typed = [alias.asname for alias in _imports_of_type_checkers("breccia")]
    assert run(code).split() == sorted([*typed, "open"])
    late = "import breccia.distributed as d; print(*d._LATE)"
    if importlib.util.find_spec("torch"):
        assert run(late).split() == sorted(alias.name for alias in _imports_of_type_checkers("breccia.distributed"))


def _imports_of_type_checkers(module):
    """Names that a module imports for type checkers, and when they are asked for."""
    tree = ast.parse(pathlib.Path(importlib.util.find_spec(module).origin).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return [alias for line in block.body if isinstance(line, ast.ImportFrom) for alias in line.names]


# With NumPy alone, whatever is installed: other packages cannot be found.
BARE = """
import builtins, importlib, importlib.machinery, inspect, pkgutil, pydoc, sys
class Only(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in (*sys.stdlib_module_names, "numpy", "breccia") or top.startswith("_sysconfigdata")
        return super().find_spec(name, path, target) if known else None
sys.meta_path[:] = [importlib.machinery.BuiltinImporter, importlib.machinery.FrozenImporter, Only]
import breccia
"""


def test_tools_walk_the_package_with_numpy_alone():
    """help(), inspect.getmembers and hasattr, of the package and of each module in it that imports."""
    code = (
        BARE
        + """
walked = [breccia]
for found in pkgutil.walk_packages(breccia.__path__, "breccia.", onerror=lambda name: None):
    try:
        walked.append(importlib.import_module(found.name))
    except ImportError:
        pass
for module in walked:
    pydoc.render_doc(module)
    for name, _ in inspect.getmembers(module):
        assert hasattr(module, name), (module, name)
    for name in dir(module):
        hasattr(module, name)
print(len(walked) > 50, hasattr(breccia, "nn"), hasattr(breccia, "bridges"), hasattr(breccia, "open"))
"""
    )
    assert run(code).split() == ["True", "False", "True", "True"]


def test_what_lacks_a_peer_says_which():
    code = (
        BARE
        + """
lacking = {"diffusers": "diffusers", "distributed": "torch", "nn": "torch", "optim": "torch", "peft": "peft",
           "sharding": "jax", "transformers": "transformers"}
for name, peer in lacking.items():
    try:
        getattr(breccia, name)
    except AttributeError as error:
        wanted = f"module 'breccia' has no attribute '{name}': {peer} is needed here: pip install 'breccia[{peer}]' ("
        assert str(error).startswith(wanted), error
        assert error.name == name
    else:
        raise AssertionError(name)
    try:
        exec(f"from breccia import {name}")
    except ImportError as error:
        assert peer in str(error), error
print(sorted(set(breccia._LAZY) - lacking.keys()))
"""
    )
    assert run(code).strip() == "['bridges', 'checkpoint', 'dlpack', 'schemes', 'sglang', 'vllm']"


def test_import_star_hides_no_builtin():
    """Of the package, and of every module that says what it exports."""
    code = (
        BARE
        + """
for found in [None, *pkgutil.walk_packages(breccia.__path__, "breccia.", onerror=lambda name: None)]:
    name = "breccia" if found is None else found.name
    if name.endswith("__main__"):
        continue
    space = {}
    try:
        exec(f"from {name} import *", space)
    except ImportError:
        continue
    for key in space.keys() & vars(builtins).keys() - {"__builtins__", "__doc__", "__name__"}:
        print(name, key)
"""
    )
    assert run(code) == ""


def test_modules_of_gguf_files_are_imported_first_of_all():
    """Checkpoints read GGUF files, and these modules use files of checkpoints: each must do as a program's first
    import."""
    for module in pkgutil.iter_modules(gguf.__path__):
        run(f"import breccia.gguf.{module.name}")
