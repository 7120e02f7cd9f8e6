# SPDX-License-Identifier: Apache-2.0
"""Reports have the keys, and values of the types, that `breccia.checkpoint.reports` tells type checkers."""

import types
import typing

import numpy as np
from breccia import checkpoint
from breccia.checkpoint import reports
from breccia.moments import Moments, save_moments
from test_merge_lora import adapter, base


def assert_is(value, kind, where):
    """The value is of the type, and so is all in it."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind)
        assert kind.__required_keys__ <= value.keys() <= hints.keys(), where
        for key, one in value.items():
            assert_is(one, hints[key], f"{where}.{key}")
    elif origin is list:
        for one in value:
            assert_is(one, arguments[0], f"{where}[]")
    elif origin is dict:
        for key, one in value.items():
            assert_is(key, arguments[0], where)
            assert_is(one, arguments[1], f"{where}.{key}")
    elif origin is types.UnionType:
        kinds = [one for one in arguments if one is not types.NoneType]
        if value is None or len(kinds) > 1:
            assert type(value) in arguments, (where, value)
        else:
            assert_is(value, kinds[0], where)
    elif kind is not typing.Any:
        assert isinstance(value, kind) or (kind is float and isinstance(value, int)), (where, value)


def test_reports_are_as_they_are_typed(tmp_path):
    source = base(tmp_path / "model")
    columns = {"model.layers.0.mlp.down_proj": 256, "model.layers.0.self_attn.q_proj": 128}
    known = {}
    for name, n in columns.items():
        known[name] = Moments(np.ones(n, np.float32), np.int64(9), full=np.eye(n, dtype=np.float32))
    save_moments(known, tmp_path / "m")
    options = {"moments": tmp_path / "m", "method": "gptq"}
    assert_is(checkpoint.convert(source, tmp_path / "o", "nvfp4", dry_run=True), reports.ConvertReport, "plan")
    assert_is(checkpoint.convert(source, tmp_path / "out", "int4", **options), reports.ConvertReport, "convert")
    assert_is(checkpoint.convert(tmp_path / "out", tmp_path / "again", "nvfp4"), reports.ConvertReport, "again")
    adapter(tmp_path / "lora")
    merged = checkpoint.merge_lora(tmp_path / "out", tmp_path / "lora", tmp_path / "merged", seed=0)
    assert_is(merged, reports.MergeReport, "merge")
    more = {"adapter": tmp_path / "lora", "moments": tmp_path / "m"}
    report = checkpoint.verify(source, tmp_path / "merged", **more)
    assert "kept" in report and "output_error" in report["tensors"][-1] | report
    assert_is(report, reports.VerifyReport, "verify")
    assert_is(checkpoint.verify(source, tmp_path / "out"), reports.VerifyReport, "verify")
    assert_is(checkpoint.inspect(tmp_path / "out"), reports.InspectReport, "inspect")
    (tmp_path / "merged" / "config.json").unlink()
    assert_is(checkpoint.complete(tmp_path / "merged"), reports.CompleteReport, "complete")
