# SPDX-License-Identifier: Apache-2.0
"""Doors to other libraries' tensors and checkpoint formats: one module each, the same verbs.

``from_<format>`` makes a ScaledTensor of foreign buffers, ``to_<format>`` the reverse; both move bytes
and quantize nothing. Peers are imported when a function needs them: an ImportError names the extra.
docs/formats.md is the map of what each format stores.

The names in the ``__all__`` of every format's module are names of this package: ``__init__.pyi`` lists the modules.
`registry` has what each format is, as a `FileFormat`.
"""

from functools import cache
from pkgutil import get_data
from typing import Any


@cache
def _names() -> dict[str, Any]:
    """Every name that ``__init__.pyi`` imports, which this module has from then on. The list is that file, and not the
    folder: where no file can be opened, a folder has none, and this raises OSError."""
    names: dict[str, Any] = {}
    exec(get_data(__name__, "__init__.pyi") or b"", names)
    public = {name: value for name, value in names.items() if not name.startswith("_")}
    globals().update(public)
    return public


def __getattr__(name: str) -> Any:
    if name == "__all__":  # of ``from breccia.bridges import *``
        return list(_names())
    if name.startswith("__") or name not in _names():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _names()[name]


def __dir__() -> list[str]:
    return sorted(_names())
