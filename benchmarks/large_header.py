# SPDX-License-Identifier: Apache-2.0
"""What a safetensors file takes whose header is as large as the format allows: 900,000 tensors in 100 MB.

    python benchmarks/large_header.py                # prints it
    python benchmarks/large_header.py --json benchmarks/results/large_header.json

Each reader is a process of its own: its processor time, and its peak memory. Python that imports NumPy is the first
row.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from documents.speed import large_header_table

READERS = {
    "Python and NumPy alone": ["-c", "import numpy"],
    "`breccia.checkpoint.Checkpoint`": [
        "-c",
        "import sys; from breccia.checkpoint import Checkpoint; Checkpoint(sys.argv[1])",
    ],
    "`breccia.open`": ["-c", "import sys, breccia; breccia.open(sys.argv[1])"],
    "`breccia inspect`": ["-m", "breccia", "inspect"],
    "`safetensors.safe_open`, to the list of names": [
        "-c",
        "import sys, safetensors; list(safetensors.safe_open(sys.argv[1], 'numpy').keys())",
    ],
}
LIMIT = 100_000_000  # bytes of a header, by the format


def write(path: Path, tensors: int) -> int:
    """A file of so many one-byte tensors, its header filled up to LIMIT by the names; the header's bytes."""

    def header(letters: int) -> bytes:
        names = (f"model.layers.{i}.".ljust(letters, "w") for i in range(tensors))
        entries = {name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate(names)}
        return json.dumps(entries, separators=(",", ":")).encode()

    letters = len(f"model.layers.{tensors}.")
    letters += (LIMIT - len(header(letters))) // tensors
    raw = header(letters)
    raw += b" " * (-len(raw) % 8)
    assert len(raw) <= LIMIT, f"{tensors} tensors do not fit into a header of {LIMIT} bytes"
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(tensors))
    return len(raw)


def cost(arguments: list[str]) -> dict[str, float]:
    """Seconds of processor time and peak bytes of a Python process."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return {"seconds": used.ru_utime + used.ru_stime, "bytes": used.ru_maxrss * 1024}


def measure(tensors: int) -> dict:
    # A process begins with the peak of the one that starts it, so this one stays small: others write and import.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        size = int(subprocess.check_output([sys.executable, __file__, "--write", str(path), "--tensors", str(tensors)]))
        rows = [{"reader": name} | cost([*arguments, str(path)]) for name, arguments in READERS.items()]
    about = "import breccia, compare_cpu; print(compare_cpu.cpu_model(), breccia.__version__, sep='\\n')"
    run = subprocess.run([sys.executable, "-c", about], cwd=Path(__file__).parent, stdout=-1, check=True, text=True)
    cpu, version = run.stdout.splitlines()
    machine = {"cpu": cpu, "python": platform.python_version(), "breccia": version}
    return {
        "machine": machine,
        "command": " ".join(["python", *sys.argv]),
        "tensors": tensors,
        "header_bytes": size,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=900_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path, help="only write the file, and print the header's bytes")
    options = parser.parse_args()
    if options.write:
        print(write(options.write, options.tensors))
        return
    result = measure(options.tensors)
    print(large_header_table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
