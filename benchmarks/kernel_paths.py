# SPDX-License-Identifier: Apache-2.0
"""Measure which way to multiply is the quickest, and write the tables by which the core chooses.

    python benchmarks/kernel_paths.py --json benchmarks/results/kernel_paths.json   # measure, five minutes, and write
    python benchmarks/kernel_paths.py           # write the tables of what is recorded
    python benchmarks/kernel_paths.py --check   # exit 1 where the tables are not those of the record

Measuring needs `cmake --workflow --preset release`. The backends that this machine runs are measured; of the others the
record keeps the rules that it has, and the machine that they were found on.

A backend's paths are gone through from the last one to the first. A path gets runs of numbers of rows, in which few
products are slower by it than by the paths after it, nor by those where it could take them: as few runs as do for all
kinds of products.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks/results/kernel_paths.json"
TABLES = ROOT / "cpp/src/matmul/rules.inl"
PROGRAM = ROOT / "build/release/benchmarks/cpp/breccia_measure_paths"
BACKENDS = ("portable", "avx2", "avx512", "avx512_bf16", "amx", "neon")
PATHS = (
    *("in_place_integer", "panels_integer", "tiles", "lanes", "in_place_bf16", "in_place_f32"),
    *("rows_f32", "panels_bf16", "panels_f32"),
)
# Kinds of products, as in cpp/src/matmul/paths/paths.hpp: a product is of one of each group.
KINDS = {
    "weight": ("numbers", "bytes", "four_bits"),
    "block": ("blocks_to_16", "blocks_to_64", "long_blocks"),
    "storage": ("as_stored", "prepared"),
    "activations": ("one_term", "two_terms", "three_terms", "decoded", "codes", "codes_in_tiles"),
}
SLACK = 20  # one of so many products may be slow so that kinds of products share a rule
SLOW = 1.05  # a path that takes more than so many times as long as another is chosen wrongly


@dataclass(frozen=True)
class Rule:
    """A row of a backend's table.

    Attributes:
        kinds: one tuple of kinds a group.
        rows: the least and the largest number of activations; None without end.
    """

    path: str
    kinds: tuple[tuple[str, ...], ...]
    rows: tuple[int, int | None]

    def holds(self, product: tuple[str, ...], rows: int) -> bool:
        within = self.rows[0] <= rows and (self.rows[1] is None or rows <= self.rows[1])
        return within and all(kind in of for kind, of in zip(product, self.kinds, strict=True))

    def text(self) -> str:
        kinds = [kind for group, of in zip(KINDS.values(), self.kinds, strict=True) if of != group for kind in of]
        rows = str(self.rows[0]) if self.rows[1] is None else f"{self.rows[0]}, {self.rows[1]}"
        product = f"only({' | '.join(kinds)})" if kinds else "any_product"
        return f"{{&paths::{self.path}, {product}, {{{rows}}}}}"


ANY = Rule(PATHS[-1], tuple(KINDS.values()), (1, None))


class Measured:
    """One weight by one type of activations: times of the paths, by number of rows."""

    def __init__(self, found: dict[str, Any], rows: str) -> None:
        kinds = found["kinds"].split()
        self.name = " ".join([*(str(found[key]) for key in ("backend", "weight", "activations", "n", "k")), kinds[-1]])
        self.rows = [int(m) for m in rows.split()]
        self.us: dict[str, list[float | None]] = {}
        self.kinds: dict[str, tuple[str, ...]] = {}
        for path, text in found["paths"].items():
            taken_as, *us = text.split()
            self.us[path] = [None if one == "-" else float(one) for one in us]
            self.kinds[path] = (*kinds, taken_as)

    def best(self, i: int) -> float:
        return min(us[i] for us in self.us.values() if us[i] is not None)

    def path(self, rules: list[Rule], i: int) -> str:
        return next(
            rule.path
            for rule in rules
            if rule.path in self.us
            and rule.holds(self.kinds[rule.path], self.rows[i])
            and self.us[rule.path][i] is not None
        )


Run = tuple[int, int] | None  # first and last place in the list of numbers of rows


class Gains:
    """What it brings that a path takes products of some kinds, or that those after it do, by number of rows."""

    def __init__(self, count: int) -> None:
        self.slow = {True: [0] * count, False: [0] * count}  # products that are SLOW so, if the path takes them or not
        self.times = {True: [0.0] * count, False: [0.0] * count}  # sums of logarithms of times over the better ones
        self.products = 0

    def add(self, own: list[float | None], others: list[float]) -> None:
        for i, (mine, other) in enumerate(zip(own, others, strict=True)):
            if mine is None:
                continue
            self.products += 1
            for taken, us in ((True, mine), (False, other)):
                self.slow[taken][i] += us > SLOW * min(mine, other)
                self.times[taken][i] += math.log(us / min(mine, other))

    def cost(self, run: Run) -> tuple[int, float]:
        """Slow products, and times, where the path takes that run of numbers of rows."""
        inside = [run is not None and run[0] <= i <= run[1] for i in range(len(self.slow[True]))]
        slow = sum(self.slow[taken][i] for i, taken in enumerate(inside))
        return slow, sum(self.times[taken][i] for i, taken in enumerate(inside))


def shared_runs(gains: dict[tuple[str, ...], Gains], runs: list[Run]) -> dict[tuple[str, ...], Run]:
    """A run for each kind of products, few in all: one that does for most kinds, then one for most of the rest."""
    costs = {kinds: {run: one.cost(run) for run in runs} for kinds, one in gains.items()}
    most = {kinds: min(costs[kinds].values())[0] + one.products // SLACK for kinds, one in gains.items()}
    chosen: dict[tuple[str, ...], Run] = {}
    while len(chosen) < len(gains):
        left = [kinds for kinds in gains if kinds not in chosen]
        content = {run: [kinds for kinds in left if costs[kinds][run][0] <= most[kinds]] for run in runs}
        times = {run: sum(costs[kinds][run][1] for kinds in content[run]) for run in runs}
        run = max(runs, key=lambda run: (len(content[run]), -times[run]))
        chosen |= dict.fromkeys(content[run], run)
    return chosen


def boxes(wanted: set[tuple[str, ...]], others: set[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ...]]:
    """Few products of kinds, group by group, that hold all that is wanted and nothing of the others."""
    groups = list(KINDS.values())
    known = [{cell[i] for cell in wanted | others} for i in range(len(groups))]

    def grown(cell: tuple[str, ...], order: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
        box = [(kind,) for kind in cell]
        for i in order:
            for kind in groups[i]:
                larger = [*box[:i], (*box[i], kind), *box[i + 1 :]]
                if kind in known[i] and kind not in box[i] and not set(itertools.product(*larger)) & others:
                    box = larger
        # Kinds of which the path takes none make no difference: all where all others are there.
        return tuple(
            group if known[i] <= set(box[i]) else tuple(kind for kind in group if kind in box[i])
            for i, group in enumerate(groups)
        )

    found = []
    left = set(wanted)
    while left:
        tried = [grown(cell, order) for cell in sorted(left) for order in itertools.permutations(range(len(groups)))]
        box = max(tried, key=lambda one: (len(set(itertools.product(*one)) & left), one))
        left -= set(itertools.product(*box))
        found.append(box)
    return found


def fit(measured: list[Measured]) -> list[Rule]:
    """The rules of a backend."""
    rules: list[Rule] = []
    for _ in range(2):  # again without what a path that comes before takes anyway
        rules = fit_once(measured, rules)
    return rules


def fit_once(measured: list[Measured], before: list[Rule]) -> list[Rule]:
    rules, grid = [ANY], measured[0].rows
    runs: list[Run] = [None, *itertools.combinations_with_replacement(range(len(grid)), 2)]
    later = {one.name: list(one.us[ANY.path]) for one in measured}  # times without the paths that come before
    for path in reversed(PATHS[:-1]):
        gains: dict[tuple[str, ...], Gains] = {}
        for one in measured:
            if path in one.us:
                others = PATHS[: PATHS.index(path)]
                asked = [None if before and one.path(before, i) in others else us for i, us in enumerate(one.us[path])]
                gains.setdefault(one.kinds[path], Gains(len(grid))).add(asked, later[one.name])
        chosen = shared_runs(gains, runs)
        of_path = []
        for run in sorted({run for run in chosen.values() if run is not None}):
            open_end = run[1] == len(grid) - 1 and path.startswith("panels")
            rows = (grid[run[0]], None if open_end else grid[run[1]])
            wanted = {kinds for kinds, its in chosen.items() if its == run}
            others = {kinds for kinds, its in chosen.items() if its is None or its[0] > run[0] or its[1] < run[1]}
            never = {kinds for kinds, one in gains.items() if one.products == 0}
            of_path += [Rule(path, box, rows) for box in boxes(wanted - never, others - never)]
        rules = of_path + rules
        for one in measured:
            for i in range(len(grid)):
                if path in one.us and any(rule.holds(one.kinds[path], grid[i]) for rule in of_path):
                    later[one.name][i] = one.us[path][i] or later[one.name][i]
    return rules


def of_record(record: dict[str, Any]) -> dict[str, list[Rule]]:
    """The rules of every backend: those that the times give, and those that are kept."""
    tables = {}
    for backend in BACKENDS:
        if backend in record["kept"]:
            tables[backend] = [
                Rule(path, tuple(tuple(given.get(group, of)) for group, of in KINDS.items()), (first, last))
                for path, given, (first, last) in record["kept"][backend]["rules"]
            ]
        else:
            tables[backend] = fit(of_backend(record, backend))
    return tables


def of_backend(record: dict[str, Any], backend: str) -> list[Measured]:
    return [Measured(one, record["rows"]) for one in record["measured"] if one["backend"] == backend]


def text(tables: dict[str, list[Rule]]) -> str:
    lines = ["// SPDX-License-Identifier: Apache-2.0", "//"]
    lines += [
        "// By which path a product is multiplied: benchmarks/kernel_paths.py writes this file from measurements.",
        "",
    ]
    for backend, rules in tables.items():
        lines += [f"constexpr Rule of_{backend}[] = {{", *(f"    {rule.text()}," for rule in rules), "};", ""]
    lines += ["constexpr RuleTable tables[] = {", *(f'    {{"{name}", of_{name}}},' for name in tables), "};", ""]
    return "\n".join(lines)


def slower(record: dict[str, Any], tables: dict[str, list[Rule]]) -> dict[str, tuple[int, int, list[str]]]:
    """Of each measured backend: products whose path takes SLOW times as long as another, of how many, and which."""
    found = {}
    for backend in dict.fromkeys(one["backend"] for one in record["measured"]):
        count, slow = 0, []
        for one in of_backend(record, backend):
            for i in range(len(one.rows)):
                path = one.path(tables[backend], i)
                count += 1
                times = one.us[path][i] / one.best(i)
                if times > SLOW:
                    slow.append((times, f"{times:.2f} {one.name} M={one.rows[i]} {path}"))
        found[backend] = (len(slow), count, [line for _, line in sorted(slow, reverse=True)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="measure, and record here")
    parser.add_argument("--check", action="store_true", help="exit 1 where the tables are not those of the record")
    args = parser.parse_args()
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    if args.json:
        done = subprocess.run([PROGRAM], stdout=subprocess.PIPE, check=True)
        new = json.loads(done.stdout)
        now = {one["backend"] for one in new["measured"]}
        kept = {backend: what for backend, what in record["kept"].items() if backend not in now}
        record = {**record, **new, "kept": kept}
        args.json.write_text(json.dumps(record, indent=None) + "\n", encoding="utf-8")
    tables = of_record(record)
    for backend, (slow, count, worst) in slower(record, tables).items():
        print(f"{backend}: {slow} of {count} chosen paths take more than {SLOW} times as long as another")
        print(*worst[:10], sep="\n")
    if args.check:
        sys.exit(text(tables) != TABLES.read_text(encoding="utf-8"))
    TABLES.write_text(text(tables), encoding="utf-8")


if __name__ == "__main__":
    main()
