# SPDX-License-Identifier: Apache-2.0
"""The tables by which the core chooses how to multiply are those that the recorded measurements give."""

import json
import re
import sys
from pathlib import Path

import pytest

kernel_paths = pytest.importorskip("kernel_paths", exc_type=ImportError)  # a source archive has no benchmarks

PATHS = Path(__file__).parents[1] / "cpp/src/matmul/paths/paths.hpp"
KINDS = ("bytes", "long_blocks", "as_stored")


def record():
    return json.loads(kernel_paths.RECORD.read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_record(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["kernel_paths.py", "--check"])
    with pytest.raises(SystemExit) as done:
        kernel_paths.main()
    assert done.value.code == 0, "python benchmarks/kernel_paths.py writes them"
    said = re.findall(r"(\w+): (\d+) of (\d+) chosen paths", capsys.readouterr().out)
    assert {backend for backend, *_ in said} | record()["kept"].keys() == set(kernel_paths.BACKENDS)
    for backend, slow, count in said:
        assert int(slow) < int(count) / 10, backend


def test_names_are_those_of_the_core():
    text = PATHS.read_text(encoding="utf-8")
    assert list(kernel_paths.PATHS) == re.findall(r"&paths::(\w+)", text)
    kinds = [kind for group in kernel_paths.KINDS.values() for kind in group]
    assert kinds == [name for name in re.findall(r"(\w+) = \d+[,;]", text) if not name.startswith("any_")]


def test_every_backend_of_other_machines_is_kept_with_its_machine():
    kept = record()["kept"]
    assert {"amx", "neon"} <= kept.keys()
    assert all(one["machine"] and one["rules"] for one in kept.values())


def measured(weight, kinds, **paths):
    found = {"backend": "avx2", "weight": weight, "activations": "x", "n": 1, "k": 1, "kinds": " ".join(kinds)}
    return kernel_paths.Measured({**found, "paths": paths}, "1 2 4 8")


def test_a_path_takes_what_it_is_the_quickest_at():
    alike = measured("one", KINDS, panels_f32="one_term 8 8 8 8", rows_f32="one_term 2 4 8.1 16")
    other = measured("two", ("numbers", *KINDS[1:]), panels_f32="one_term 8 8 8 8", rows_f32="one_term 2 4 8.1 16")
    rule, last = kernel_paths.fit([alike, other])
    assert (rule.path, rule.rows, last) == ("rows_f32", (1, 2), kernel_paths.ANY)
    assert [alike.path([rule, last], i) for i in range(4)] == ["rows_f32"] * 2 + ["panels_f32"] * 2


def test_kinds_of_products_that_differ_have_rules_of_their_own():
    few = measured("few", KINDS, panels_f32="one_term 8 8 8 8", rows_f32="one_term 2 16 32 64")
    many = measured("many", (*KINDS[:2], "prepared"), panels_f32="one_term 8 8 8 8", rows_f32="one_term 2 4 6 16")
    rules = kernel_paths.fit([few, many])
    assert [few.path(rules, i) for i in range(4)] == ["rows_f32"] + ["panels_f32"] * 3
    assert [many.path(rules, i) for i in range(4)] == ["rows_f32"] * 3 + ["panels_f32"]


def test_a_path_that_refuses_is_not_what_is_compared():
    one = measured("one", KINDS, panels_f32="one_term 8 8 8 8", rows_f32="one_term 2 - - 2")
    rules = kernel_paths.fit([one])
    assert [one.path(rules, i) for i in range(4)] == ["rows_f32", "panels_f32", "panels_f32", "rows_f32"]
