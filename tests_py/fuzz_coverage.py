# SPDX-License-Identifier: Apache-2.0
"""The files of fuzz_files.py, led by what code they reach: `python fuzz_coverage.py [options of libFuzzer]`, such as
-max_total_time=60. It needs atheris. The number of runs and of branches reached is what libFuzzer prints at its end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["breccia.checkpoint", "breccia.bridges"]):
    import fuzz_files
from hostile.crashes import packed, unpacked
from pace import import_peers

FOLDER = "FUZZ_COVERAGE_FOLDER"
WHOLE = 16  # of so many cases, one is converted, too


def changed(raw: bytes, most: int, seed: int) -> bytes:
    """A case with changed bytes, JSON, headers or tensors: most cases that bytes alone make end at the header."""
    case = unpacked(raw)
    if not case:
        return atheris.Mutate(raw, most)
    made = packed(fuzz_files.Mutator(seed).case(case))
    return made if len(made) <= most else raw


class Target:
    """Reads a case; raises what is no refusal."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def __call__(self, raw: bytes) -> None:
        case = unpacked(raw)
        if not case:
            return
        self.count += 1
        place, out = self.folder / "case", self.folder / "out"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for name, content in case.items():
            (place / name).write_bytes(content)
        begin = time.process_time()
        try:
            fuzz_files.read(place if len(case) > 1 else place / next(iter(case)), out, whole=self.count % WHOLE == 0)
        except fuzz_files.REFUSED as error:
            assert len(str(error)) > 8, "an empty message"
        assert time.process_time() - begin < fuzz_files.SECONDS, f"{time.process_time() - begin:.1f} s"


def main() -> int:
    """Another process fuzzes: libFuzzer ends its own before anything could be removed."""
    shared = Path("/dev/shm")
    place = shared if os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=place, ignore_cleanup_errors=True) as folder:
        return subprocess.run([sys.executable, *sys.argv], env={**os.environ, FOLDER: folder}, check=False).returncode


def fuzz(folder: Path) -> None:
    import_peers()
    warnings.simplefilter("error")
    corpus = folder / "corpus"
    corpus.mkdir()
    good, odd = fuzz_files.seeds(folder / "seeds")
    for number, case in enumerate([*good, *odd]):
        (corpus / str(number)).write_bytes(packed(case))
    options = ["-max_len=131072", "-rss_limit_mb=8192", "-len_control=0", "-print_final_stats=1", *sys.argv[1:]]
    atheris.Setup([sys.argv[0], *options, str(corpus)], Target(folder), custom_mutator=changed)
    atheris.Fuzz()


if __name__ == "__main__":
    if FOLDER in os.environ:
        fuzz(Path(os.environ[FOLDER]))
    sys.exit(main())
