# SPDX-License-Identifier: Apache-2.0
"""The table of what continuous integration runs, of .ci/stages.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from documents.markdown import table

FILE = Path(__file__).parents[2] / ".ci/stages.py"


def load() -> Any:
    """The module .ci/stages.py."""
    spec = importlib.util.spec_from_file_location("stages", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["stages"] = module  # where its dataclass looks for itself
    spec.loader.exec_module(module)
    return module


def stages() -> str:
    """Each stage: what it protects, and on which change it runs."""
    module = load()
    rows = [
        [
            f"`{stage.command}`",
            stage.protects,
            "always"
            if stage.paths == module.ALWAYS
            else ", ".join(f"`{path}`" for path in stage.paths) or "each night and before a release",
        ]
        for stage in module.STAGES
    ]
    return table(["stage", "what would go unseen without it", "runs on a change of"], rows)
