# SPDX-License-Identifier: Apache-2.0
"""What this installation can do: kernels, and the peers it found."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import textwrap
from pathlib import Path
from typing import Any

from breccia import _core, bridges
from breccia._version import __version__
from breccia.device import cpu_info

_XLA = hasattr(_core, "xla_handlers")  # whether breccia was built with jaxlib's headers
_JIT = {"ffi": "XLA's handlers (ffi)", "callback": "callbacks through Python (callback)"}

# Distributions looked for, what each is for and the extra that installs it; peers of bridges come from the bridges.
_FRAMEWORKS = {
    "numpy": ("arrays", ""),
    "ml_dtypes": ("NumPy's low-precision dtypes", "ml_dtypes"),
    "torch": ("torch tensors, training, GPUs", "torch"),
    "jax": ("JAX arrays", "jax"),
    "mlx": ("MLX arrays", "mlx"),
    "triton": ("GPU kernels", "triton"),
    "safetensors": ("the format's own library; not needed", "bridges"),
}


def doctor() -> dict[str, Any]:
    """Versions and capabilities, of JSON types. Imports no peer."""
    return {
        "breccia": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": dict(cpu_info()),
        "memory_bytes": _memory(),
        "gpus": _gpus(),
        "jit_of_jax": "callback" if os.environ.get("BRECCIA_XLA") == "callback" or not _XLA else "ffi",
        "peers": {name: _version(name) for name in _uses()},
        "bridges": sorted(bridges.registry()),
    }


def _uses() -> dict[str, tuple[str, str]]:
    """Distribution -> what it is for and its extra."""
    peers = {
        bridge.peer.partition(".")[0]: (f"the {name} bridge", bridge.extra)
        for name, bridge in bridges.registry().items()
        if bridge.peer
    }
    return dict(sorted({**peers, **_FRAMEWORKS}.items()))


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return None


def _gpus() -> list[str]:
    """Names of NVIDIA's cards, as the driver lists them: torch need not be imported for that."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            lines = path.read_text("utf-8", "replace").splitlines()
            found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def _version(name: str) -> str | None:
    try:  # names are normalised: _ and - are the same
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def render(report: dict[str, Any]) -> str:
    """The report as lines of at most 80 characters."""
    cpu, memory = report["cpu"], report["memory_bytes"]
    threads = "1 thread" if cpu["threads"] == 1 else f"{cpu['threads']} threads"
    gpus = ", ".join(report["gpus"]) or "none found; CPU kernels are used"
    left_out = f"; this build left out {', '.join(cpu['left_out'])}: BRECCIA_BACKENDS" if cpu["left_out"] else ""
    lines = [
        f"breccia {report['breccia']} on Python {report['python']}, {report['platform']}",
        "",
        f"CPU kernels  {cpu['backend']}, {threads} (this machine can run {', '.join(cpu['supported'])}{left_out})",
        f"memory       {'unknown' if memory is None else f'{memory / 2**30:.0f} GiB'}",
        f"GPUs         {gpus}",
        f"jax.jit      {_JIT[report['jit_of_jax']]} on a CPU",
        "",
    ]
    for name, (use, extra) in _uses().items():
        version = report["peers"].get(name)
        lines.append(f"{name:<20} {version or 'missing':<12} {use}")
        if version is None and extra:
            lines.append(f"{'':<20} {'':<12} pip install 'breccia[{extra}]'")
    lines += ["", f"{'bridges':<12} {', '.join(report['bridges'])}"]
    lines.append(
        "elsewhere    pip install . in its repository: as yet pip install breccia fetches 0.1.3, another program"
    )
    return "\n".join(
        part
        for line in lines
        for part in textwrap.wrap(line, 80, subsequent_indent=" " * 13, drop_whitespace=True) or [""]
    )
