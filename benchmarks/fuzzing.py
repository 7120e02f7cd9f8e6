# SPDX-License-Identifier: Apache-2.0
"""Fuzzes for some time, and adds what ran to the executions that are on record.

    python benchmarks/fuzzing.py 3600 --json benchmarks/results/fuzzing.json

Executions and seconds are those of all runs. Branches (edges of the control flow) are those that the last run's inputs
reached; for files, those of the Python modules that read them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXECUTED = re.compile(r"^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)
REACHED = re.compile(r"^#\d+\s+DONE\s+cov: (\d+)", re.MULTILINE)
SECONDS = re.compile(r"Done \d+ runs in (\d+) second")


def run(seconds: int) -> dict[str, dict[str, int]]:
    """`.ci/fuzz`, and what each target tells at its end.

    Raises:
        subprocess.CalledProcessError: a target found something; its report is on the terminal.
    """
    command = subprocess.Popen([".ci/fuzz", str(seconds)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    lines = []
    for line in command.stdout:
        sys.stdout.write(line)
        lines.append(line)
    if command.wait():
        raise subprocess.CalledProcessError(command.returncode, ".ci/fuzz")
    parts = re.split(r"^--- (\w+)$", "".join(lines), flags=re.MULTILINE)[1:]
    return {name: told(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def told(text: str) -> dict[str, int]:
    """Executions, seconds and branches reached, of a target's output."""
    patterns = {"executions": EXECUTED, "seconds": SECONDS, "reached": REACHED}
    return {name: int(found[-1]) for name, pattern in patterns.items() if (found := pattern.findall(text))}


def added(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The record with another run in it."""
    made = dict(before)
    for name, one in now.items():
        kept = before.get(name, {})
        made[name] = {**one, **{key: kept.get(key, 0) + one[key] for key in ("executions", "seconds")}}
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=int, help="for all targets together")
    parser.add_argument("--json", type=Path, help="the record, which this run is added to")
    options = parser.parse_args()
    now = run(options.seconds)
    if options.json:
        before = json.loads(options.json.read_text()) if options.json.is_file() else {}
        options.json.write_text(json.dumps(added(before, now), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
