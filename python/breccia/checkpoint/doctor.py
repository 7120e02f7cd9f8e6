# SPDX-License-Identifier: Apache-2.0
"""What this installation can do: kernels, and the peers it found."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from breccia import bridges
from breccia._version import __version__
from breccia.cpu import cpu_info

__all__ = ["doctor", "render"]

# Distributions looked for: frameworks and readers here, peers of the bridges from the bridges themselves.
_FRAMEWORKS = ("numpy", "ml_dtypes", "torch", "jax", "mlx", "triton", "safetensors", "matplotlib")


def doctor() -> dict[str, Any]:
    """Versions and capabilities, of JSON types. Imports no peer."""
    peers = {m.PEER.partition(".")[0] for m in bridges.modules().values() if m.PEER}
    names = sorted({*_FRAMEWORKS, *peers})
    return {
        "breccia": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": dict(cpu_info()),
        "peers": {name: _version(name) for name in names},
        "bridges": sorted(bridges.modules()),
    }


def _version(name: str) -> str | None:
    try:  # names are normalised: _ and - are the same
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def render(report: dict[str, Any]) -> str:
    """The report as lines."""
    cpu = report["cpu"]
    lines = [
        f"breccia {report['breccia']}, Python {report['python']}, {report['platform']}",
        f"kernels: {cpu['backend']} of {', '.join(cpu['supported'])}; {cpu['threads']} threads",
        "peers:",
    ]
    lines += [f"  {name:<20} {version or 'not installed'}" for name, version in report["peers"].items()]
    lines.append(f"bridges: {', '.join(report['bridges'])}")
    return "\n".join(lines)
