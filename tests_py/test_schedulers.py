# SPDX-License-Identifier: Apache-2.0
"""Conversions in parts by Ray and Dask, as the examples do it: one of two workers is killed, the bytes are those of one
process."""

import os
import subprocess
import sys
from pathlib import Path

import checkpoints
import pytest
from breccia.checkpoint import convert
from fault_runner import tree

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_a_worker_of_ray_is_killed(tmp_path):
    pytest.importorskip("ray")
    converts_as_one_process("11_convert_with_ray", tmp_path)


def test_a_worker_of_dask_is_killed(tmp_path):
    pytest.importorskip("dask.distributed")
    converts_as_one_process("12_convert_with_dask", tmp_path)


def converts_as_one_process(example, tmp_path):
    source = checkpoints.deepseek_v3(tmp_path / "in")
    convert(source, tmp_path / "whole", "nvfp4")
    paths = [os.pathsep.join([str(EXAMPLES), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])]
    env = {**os.environ, "PYTHONPATH": paths[0], "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    env["HOME"] = str(tmp_path)
    runner, flag = Path(__file__).parent / "scheduler_runner.py", tmp_path / "killed"
    command = [sys.executable, runner, example, source, tmp_path / "out", "nvfp4", flag]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert flag.exists()
    assert [f"part {i} of 5" in run.stdout for i in range(1, 6)] == [True] * 5
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
