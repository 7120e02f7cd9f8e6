# SPDX-License-Identifier: Apache-2.0
"""`accuracy.py` by the name that 0.1 gave it: cosine similarity and SQNR of every recipe, mean of 8 seeds.

python benchmarks/bench_accuracy.py
"""

from accuracy import main

if __name__ == "__main__":
    main()
