# SPDX-License-Identifier: Apache-2.0
"""What `import breccia` takes over NumPy's own import, in fresh interpreters:

python benchmarks/import_time.py [--rounds 9]
python benchmarks/import_time.py --json benchmarks/results/import_time.json
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import breccia
from compare_cpu import cpu_model

CODE = "import time, numpy; t = time.perf_counter(); import breccia; print(time.perf_counter() - t)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = options.rounds
    command = [sys.executable, "-c", CODE]
    times = [1e3 * float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(rounds)]
    print(f"{min(times):.0f} ms at best, {statistics.median(times):.0f} ms median of {rounds} (limit: 150 ms)")
    if options.json:
        result = {
            "machine": {"cpu": cpu_model(), "breccia": breccia.__version__},
            "command": " ".join(["python", *sys.argv]),
            "rounds": rounds,
            "best_ms": min(times),
            "median_ms": statistics.median(times),
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
