# SPDX-License-Identifier: Apache-2.0
"""What continuous integration says of a peer that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import required_peers

SKIPS = {
    "module": 'import pytest\npytest.importorskip("no_such_peer")\ndef test(): pass\n',
    "test": 'import pytest\ndef test(): pytest.importorskip("no_such_peer.part")\n',
    "words": 'import pytest\ndef test(): pytest.skip("no-such-peer is not installed")\n',
    "mark": 'import pytest\n@pytest.mark.skipif(True, reason="no_such_peer is not installed")\ndef test(): pass\n',
    "fixture": 'import pytest\n@pytest.fixture\ndef a(): pytest.importorskip("no_such_peer")\ndef test(a): pass\n',
}


@pytest.mark.parametrize("required", ["1", ""])
def test_a_skip_for_want_of_a_package_fails(tmp_path: Path, required: str) -> None:
    for name, text in SKIPS.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "test_platform.py").write_text('import pytest\ndef test(): pytest.skip("needs two GPUs")\n')
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "--continue-on-collection-errors", "-p", "required_peers", str(tmp_path)],
        env={**os.environ, "REQUIRE_PEERS": required, "PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == (1 if required else 0), run.stdout
    last = run.stdout.strip().splitlines()[-1]
    assert ("1 skipped" in last) if required else (f"{len(SKIPS) + 1} skipped" in last), run.stdout
    assert run.stdout.count("REQUIRE_PEERS=1, but ") >= (len(SKIPS) if required else 0)


@pytest.mark.parametrize(
    ("reason", "wanting"),
    [
        ("Skipped: could not import 'torchao.quantization': No module named 'torchao'", True),
        ("Skipped: README.md:3: sklearn is not installed", True),
        ("Skipped: could not import 'llama_cpp': No module named 'llama_cpp'", False),
        ("Skipped: needs a CUDA device of capability 8.9 or later", False),
    ],
)
def test_reasons(reason: str, wanting: bool) -> None:
    assert required_peers.is_wanting(reason) == wanting
