# SPDX-License-Identifier: Apache-2.0
"""What `import breccia` takes over NumPy's own import, in fresh interpreters:

python benchmarks/import_time.py [--rounds 9]
"""

import argparse
import statistics
import subprocess
import sys

CODE = "import time, numpy; t = time.perf_counter(); import breccia; print(time.perf_counter() - t)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    command = [sys.executable, "-c", CODE]
    times = [1e3 * float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(rounds)]
    print(f"{min(times):.0f} ms at best, {statistics.median(times):.0f} ms median of {rounds} (limit: 150 ms)")


if __name__ == "__main__":
    main()
