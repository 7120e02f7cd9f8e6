# SPDX-License-Identifier: Apache-2.0
"""The table of what continuous integration runs, of .ci/stages.py."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from documents.markdown import table

FILE = Path(__file__).parents[2] / ".ci/stages.py"


def load(name: str = "stages") -> Any:
    """A module of .ci, which others there import by its name."""
    spec = importlib.util.spec_from_file_location(name, FILE.with_stem(name))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks for itself
    spec.loader.exec_module(module)
    return module


def share(command: str) -> str:
    """What a stage runs of cases that are alike, as its script says."""
    turns = re.search(
        r"^ *take_turns (\d+)", (FILE.parents[1] / command.split(maxsplit=1)[0]).read_text(), re.MULTILINE
    )
    return f"one of {turns[1]} that are alike" if turns else "all"


def runs_on(stage: Any, module: Any) -> str:
    if stage.paths == module.ALWAYS:
        return "always"
    times = [] if stage.in_turn else ["each night and before a release"]
    return ", ".join([f"`{path}`" for path in stage.paths] + times)


def stages() -> str:
    """Each stage: what it protects, how much of it runs, and on which change."""
    module = load()
    rows = [
        [
            f"`{stage.command}`",
            stage.protects,
            share(stage.command),
            runs_on(stage, module),
        ]
        for stage in module.STAGES
    ]
    return table(["stage", "what would go unseen without it", "cases", "runs on a change of"], rows)
