# SPDX-License-Identifier: Apache-2.0
"""Tables of times on CPUs and GPUs."""

from __future__ import annotations

import re
from typing import Any

from documents.markdown import RESULTS, load, measured, number, table, times

CPU = [  # group, name, what the reader is told, the peer
    ("cast", "fp32 → FP8 1×128", "quantize 2048 × 2048 float32 to FP8, 1 × 128", "torch.compile"),
    ("cast", "fp32 → NVFP4", "… to NVFP4", "NumPy"),
    ("dequantize", "FP8 1×128 → fp32", "FP8 back to float32", "torch.compile"),
    ("matmul M=1", "bf16 × FP8 1×128", "1 row of bf16 × FP8 weights 4096 × 4096", "torch bf16"),
    ("matmul M=1", "bf16 × NVFP4", "… × NVFP4", "torch bf16"),
    ("matmul M=1", "bf16 × INT4 g128", "… × INT4", "torch bf16"),
    ("matmul M=16", "bf16 × NVFP4", "16 rows × NVFP4", "torch bf16"),
    ("matmul M=512", "bf16 × NVFP4", "512 rows × NVFP4", "torch bf16"),
    ("matmul M=512", "fp32 × INT4 g128, zero points", "512 rows of fp32 × INT4 with zero points", "torch fp32"),
]
ANY_CPU = [  # name, what the reader is told, the peer of one row
    ("bf16 × FP8 1×128", "FP8, 1 × 128", "torch bf16"),
    ("fp32 × FP8 1×128", "FP8, 1 × 128; fp32 activations", "torch fp32"),
    ("bf16 × INT8 per row", "INT8, per row", "torch bf16"),
    ("fp32 × INT8 per row", "INT8, per row; fp32 activations", "torch fp32"),
    ("bf16 × MXFP4", "MXFP4", "torch bf16"),
    ("bf16 × NVFP4", "NVFP4", "torch bf16"),
    ("bf16 × INT4 g128", "INT4", "torch bf16"),
    ("fp32 × INT4 g128", "INT4; fp32 activations", "torch fp32"),
]
GPU = [  # group, name, shape, further condition, what the reader is told
    ("product", "1x128 by 128x128", "4096x4096x4096", "", "FP8 × FP8 in blocks, 4096³", "cuBLASLt FP8"),
    ("product", "per tensor", "4096x4096x4096", "fast", "FP8 × FP8 per tensor, 4096³", "cuBLASLt FP8"),
    (
        "weight-only",
        "NVFP4BlockScaling, L2 cold",
        "1x7168x4096",
        "",
        "1 row of bf16 × NVFP4 weights 7168 × 4096",
        "cuBLAS bf16",
    ),
    ("weight-only", "INT4Scaling, L2 cold", "1x7168x4096", "", "… × INT4", "cuBLAS bf16"),
    ("weight-only", "NVFP4BlockScaling, L2 cold", "16x7168x4096", "", "16 rows × NVFP4", "cuBLAS bf16"),
    ("weight-only", "NVFP4BlockScaling, L2 cold", "256x7168x4096", "", "256 rows × NVFP4", "cuBLAS bf16"),
    (
        "grouped",
        "NVFP4BlockScaling by bf16",
        "16 experts, 2048x4096x2048",
        "",
        "16 experts × NVFP4",
        "torch._grouped_mm bf16",
    ),
]


def cpu_summary() -> str:
    return cpu_table() + measured("cpu", ", one thread")


def cpu_table(result: str = "cpu", threads: int = 1) -> str:
    found = {(r["group"], r["name"]): r for r in load(result)["rows"] if r["threads"] == threads}
    rows = []
    for group, name, told, peer in CPU:
        r = found[group, name]
        rows.append([told, f"{r['ms']['breccia']:.2f} ms", peer, times(r["times_as_fast_as"][peer])])
    return table(["work", "breccia", "against", "as fast"], rows, "lrlr")


def cpu_backends() -> str:
    """One row of activations on the backends for CPUs without bfloat16 instructions."""
    results = {
        backend: {r["name"]: r for r in load(f"cpu_{backend}")["rows"] if r["group"] == "matmul M=1"}
        for backend in ("avx2", "avx512")
    }
    rows = []
    for name, told, peer in ANY_CPU:
        found = [of[name] for of in results.values()]
        columns = [(f"{r['ms']['breccia']:.2f} ms", times(r["times_as_fast_as"][peer])) for r in found]
        rows.append([told, peer, *(cell for column in columns for cell in column)])
    head = ["4096 × 4096 weights", "against", "avx2", "as fast", "avx512", "as fast"]
    return table(head, rows, "llrrrr") + measured("cpu_avx2", ", one thread")


def cpu_int8() -> str:
    """INT8 activations, rounded in the call, beside ggml's quickest product of as many bits and torch's of floats."""
    results = [(load("cpu_int8_avx2"), "torch fp32"), (load("cpu_int8"), "torch bf16")]
    found = [{(r["group"], r["name"]): r for r in result["rows"]} for result, _ in results]
    rows = []
    for group, name in found[0]:
        if group not in ("matmul M=1", "matmul M=512"):
            continue
        row = [group.partition("=")[2], name.removeprefix("INT8 × ")]
        for of, (_, floats) in zip(found, results, strict=True):
            one = of[group, name]
            peers = one["times_as_fast_as"]
            ggml = [ratio for peer, ratio in peers.items() if peer.startswith("ggml")]
            row += [f"{one['ms']['breccia']:.2f} ms", times(min(ggml)) if ggml else "–", times(peers[floats])]
        rows.append(row)
    head = ["rows", "weights, 4096 × 4096"]
    for result, floats in results:
        head += [result["cpu"]["backend"], "as fast as ggml's best", f"as fast as {floats}"]
    return table(head, rows, "rl" + "r" * 6) + measured("cpu_int8", ", one thread")


def gpu_summary() -> str:
    return gpu_table() + measured("gpu", ", weights not in the L2 cache")


def gpu_table() -> str:
    rows = []
    for group, name, shape, accumulate, told, peer in GPU:
        r = next(
            r
            for r in load("gpu")["results"]
            if (r["group"], r["name"], r.get("shape")) == (group, name, shape)
            and accumulate in r.get("accumulate", "")
            and (accumulate or r.get("accumulate", "fp32 every 128") == "fp32 every 128")
        )
        rows.append([told, f"{r['us']:.1f} µs", peer, times(r["ratio"])])
    return table(["work", "breccia", "against", "as fast"], rows, "lrlr")


_WORDS = {
    "fp8": "FP8",
    "nvfp4": "NVFP4",
    "mxfp8": "MXFP8",
    "mxfp4": "MXFP4",
    "int4": "INT4",
    "int8": "INT8",
    "block": "FP8 1 × 128",
    "g128": "groups of 128",
    "1x128": "1 × 128",
    "128x128": "128 × 128",
}


def _told(name: str) -> str:
    """A row's name as the pages spell recipes."""
    return re.sub(r"\w+", lambda word: _WORDS.get(word[0], word[0]), name)


def gpu_layers() -> str:
    rows = [
        [
            _told(r["name"]), how, r["tokens"], f"{r['ms']:.2f} ms", times(r["times_bf16"])
        ]
        for how in ("eager", "compiled")
        for r in load("gpu_eager")["results"]
        if r["group"].startswith(f"{how} decoder")
    ]  # fmt: skip
    return table(["weights", "", "tokens", "breccia", "as fast as bf16"], rows, "llrrr")


def gpu_pairs() -> str:
    """As fast as bfloat16, by rows; left what is the same on both sides, and mixed pairs at their slowest."""
    cells = {(r["name"], r["m"]): r["ratio"] for r in load("gpu_pairs")["results"]}
    rows_of_x = sorted({m for _, m in cells})
    names = list(dict.fromkeys(name.split(" × ")[1] for name, _ in cells))
    rows = [
        [f"{_told(left)} × {_told(name)}", *(times(cells[f"{left} × {name}", m]) for m in rows_of_x)]
        for name in names
        for left in ("bf16", name)
    ]
    mixed = [[ratio for (name, rows), ratio in cells.items() if rows == m] for m in rows_of_x]
    rows.append(["the slowest of all 90 pairs", *(times(min(ratios)) for ratios in mixed)])
    return table(["activations × weights", *(f"{m} rows" for m in rows_of_x)], rows, "lrrrr")


def gpu_experts() -> str:
    rows = []
    for r in load("gpu_experts")["results"]:
        if r["name"].startswith("MX") or r["name"] == "FP8 128x128 by bf16":  # near NVFP4: in the result
            continue
        theirs = r.get("deep_gemm_us")
        ours = [f"{r['us']:.0f} µs", times(r["ratio"]), "" if theirs is None else times(theirs / r["us"])]
        rows.append([f"{r['experts']} × {r['rows']}", r["name"], *ours])
    head = ["experts × rows", "weights", "in a graph", "torch._grouped_mm bf16", "DeepGEMM"]
    return table(head, rows, "llrrr")


def gpu_moe() -> str:
    rows = []
    for r in load("gpu_moe")["results"]:
        kept = [f"{r[key]:,.0f} MB" for key in ("saved_mb", "saved_bf16_mb")]
        took = [f"{r[key]:.1f} ms" for key in ("ms", "bf16_ms")]
        rows.append([r["name"], *took, times(r["ratio"]), *kept, f"{r['saved_ratio']:.2f}"])
    head = ["layer", "FP8", "bf16", "as fast", "FP8 keeps", "bf16 keeps", "of bf16's"]
    return table(head, rows, "lrrrrrr")


def gpu_peers() -> str:
    rows = []
    for r in load("gpu_peers")["results"]:
        others = [r.get(f"{peer}_us") for peer in ("deepgemm", "cublas", "bf16")]
        shape = r["shape"].replace("x", " × ")
        rows.append([shape, f"{r['us']:.1f} µs", *("" if us is None else times(us / r["us"]) for us in others)])
    return table(["M × N × K", "breccia", "DeepGEMM", "cuBLASLt FP8", "bf16"], rows, "lrrrr")


def distributed() -> str:
    rows = [
        [
            _told(r["recipe"]),
            f"{us['bf16']:.0f}",
            f"{us['gather']:.0f}",
            f"{us['cast + gather']:.0f}",
            f"{100 * r['of_bf16']:.0f} %",
            f"{100 * r['four_of_bf16']:.0f} %",
        ]
        for r in load("distributed")["results"]
        if r["mib_a_rank"] == 256
        for us in [r["us"]]
    ]
    head = ["recipe", "bf16, µs", "gather", "cast and gather", "of bf16", "of bf16, one of four"]
    return table(head, rows, "lrrrrr")


def training_step() -> str:
    rows = [
        [
            r["recipe"].replace("128x128", "128 × 128"),
            f"{r['ms_a_step']:.1f} ms",
            f"{r['tokens_a_second']:,}",
            times(r["of_bf16"]),
            f"{r['losses'][0]:.3f}",
            f"{r['losses'][-1]:.3f}",
        ]
        for r in load("distributed_training")["results"]
    ]
    head = ["products and gathers", "a step", "tokens a second", "as fast", "first loss", "last loss"]
    return table(head, rows, "lrrrrr")


def gpu_casts() -> str:
    """A sentence."""
    found = [
        r["of_copy"]
        for r in load("gpu")["results"]
        if r["group"] in ("cast", "dequantize") and "torch_operations_us" not in r
    ]
    least, most = (f"{100 * share:.0f}" for share in (min(found), max(found)))
    return f"Casts of 8192 × 8192 numbers of bf16, and back, run at {least} to {most} % of a copy's bandwidth."


def gpu_accuracy() -> str:
    rows = [
        [row["name"], *(f"{row[key]:.1e}" for key in ("block", "tensor_promoted", "tensor_fast"))]
        for row in load("gpu")["results"]
        if row["group"] == "accuracy"
    ]
    return table(["error, float32 output", "1×128 by 128×128", "per tensor, fp32 every 128", "fast"], rows)


def gpu_full() -> str:
    """The page benchmarks/results/gpu.md."""
    data = load("gpu")
    before, after, results = data["machine"]["before"], data["machine"]["after"], data["results"]
    copy = next(row["gb_per_s"] for row in results if row["group"] == "copy")
    parts = [
        f"{before['gpu']}, driver {before['driver_version']}, torch {before['torch']}, Triton {before['triton']}, CUDA"
        f" {before['cuda']}; SM clock {before['clocks.sm']} before and {after['clocks.sm']} after the run (at most"
        f" {before['clocks.max.sm']}), memory {before['clocks.mem']}, power limit {before['power.limit']}.",
        "Times are medians of CUDA graph replays; ratios are the peer's time over ours, alternating in one run. Errors"
        " are relative, against float64 of the dequantized operands; outputs are bfloat16, whose rounding alone is"
        " 1.7e-3. L2 cold: eight weights in turn.",
        f"### Casts\n\nA copy of the same tensor moves {copy:.0f} GB/s, read and written bytes counted.",
        _bandwidths(results),
        "### FP8 by FP8",
        _products(results),
        _against(results, "small", "few rows", "cuBLASLt", "cublas_us"),
        "### bfloat16 by quantized weights",
        _against(results, "weight-only", "weights", "bf16 cuBLAS", "bf16_cublas_us"),
        "### Grouped",
        _against(results, "grouped", "weights", "bf16 torch._grouped_mm", "bf16_grouped_us"),
        "### Accumulation",
        gpu_accuracy(),
    ]
    return "\n\n".join(parts) + "\n"


def _bandwidths(results: list[dict[str, Any]]) -> str:
    rows = [
        [
            row["name"],
            group,
            number(row["us"], 1),
            round(row["gb_per_s"]),
            number(row["of_copy"]),
            number(row.get("torch_operations_us"), 0),
        ]
        for group in ("cast", "dequantize", "requantize", "search")
        for row in results
        if row["group"] == group
    ]
    return table(["bf16 8192×8192", "", "µs", "GB/s", "of copy", "whole-array operations, µs"], rows)


def _products(results: list[dict[str, Any]]) -> str:
    rows = [
        [
            row["name"],
            row["shape"],
            row["accumulate"],
            number(row["us"], 1),
            round(row["tflops"]),
            number(row["cublas_us"], 1),
            number(row["ratio"]),
            f"{row['error']:.1e} / {row['cublas_error']:.1e}",
        ]
        for row in results
        if row["group"] == "product" and "ratio" in row
    ]
    head = ["FP8 product", "M×N×K", "accumulate", "µs", "TFLOP/s", "cuBLASLt µs", "ratio", "error, ours / cuBLASLt"]
    return table(head, rows)


def _against(results: list[dict[str, Any]], group: str, title: str, peer: str, key: str) -> str:
    rows = [
        [
            row["name"].replace("BlockScaling", "").replace("Scaling", ""),
            row["shape"],
            number(row["us"], 1),
            number(row[key], 1),
            number(row["ratio"]),
            f"{row['error']:.1e}" if "error" in row else "",
        ]
        for row in results
        if row["group"] == group
    ]
    return table([title, "M×N×K", "µs", f"{peer} µs", "ratio", "error"], rows)


def calls() -> str:
    return calls_table(load("call_cost"))


def calls_table(results: dict[str, Any]) -> str:
    """A row for each recipe, a column for each verb and kind of array."""
    recipes = list(dict.fromkeys(row["recipe"] for row in results["rows"]))
    heads = list(dict.fromkeys((row["verb"], kind) for row in results["rows"] for kind in row["us"]))
    found = {(row["recipe"], row["verb"], kind): us for row in results["rows"] for kind, us in row["us"].items()}
    cells = {key: f"{us:.1f} µs" for key, us in found.items()}
    rows = [[recipe, *(cells.get((recipe, *head), "") for head in heads)] for recipe in recipes]
    return table(["", *(f"`{verb}`, {kind}" for verb, kind in heads)], rows, "l" + "r" * len(heads))


def optimizer() -> str:
    return optimizer_table(load("optimizer")) + measured("optimizer", ", one thread")


def optimizer_gpu() -> str:
    return optimizer_table(load("optimizer_gpu")) + measured("optimizer_gpu")


def gptq_gpu() -> str:
    """A layer on a GPU and on the CPU beside it."""
    rows = [
        [
            row["recipe"],
            f"{row['gpu_seconds']:.2f} s",
            f"{row['cpu_seconds']:.2f} s",
            f"{100 * row['same_bytes']:.2f} %",
            f"{row['error_of_cpu'] - 1:+.0e}",
        ]
        for row in load("gptq_gpu")["rows"]
    ]
    head = ["4096 × 4096", "GPU", "its CPU's 16 threads", "bytes that are the CPU's", "weighted error, less the CPU's"]
    return table(head, rows, "lrrrr") + measured("gptq_gpu")


def optimizer_table(results: dict[str, Any]) -> str:
    """Times and losses against those of the first row."""
    first, rows = results["rows"][0], []
    for r in results["rows"]:
        row = [r["name"], f"{r['bytes']:.3f}", f"{r['ms']:.3g} ms", times(first["ms"] / r["ms"])]
        if "loss" in first:
            row += [f"{r['loss']:.4f}", f"{100 * (r['loss'] / first['loss'] - 1):+.2f} %"]
        rows.append(row)
    heads = ["", "bytes a number", "a step", "as fast", "loss", "against the first"][: len(rows[0])]
    return table(heads, rows, "l" + "r" * (len(heads) - 1))


def cast_options() -> str:
    return options_table(load("cast_options"))


def options_table(results: dict[str, Any]) -> str:
    rows = [[row["recipe"], *(f"{ms:.2g} ms" for ms in row["ms"])] for row in results["rows"]]
    return table(["", *results["columns"]], rows, "lrrrr")


def frameworks() -> str:
    return frameworks_table(load("frameworks"))


def frameworks_table(results: dict[str, Any]) -> str:
    """Of the core by itself a time, of torch and JAX how many times that."""
    rows = []
    for row in results["rows"]:
        ms = row["ms"]
        ratios = [f"{ms[name] / ms['NumPy']:.2f} ×" for name in ("torch", "JAX")]
        jitted = [f"{ms[name]:.2f} ms" if name in ms else "" for name in ("jit, ffi", "jit, callback")]
        rows.append([row["recipe"], f"{ms['NumPy']:.2f} ms", *ratios, *jitted])
    head = ["cast to", "NumPy", "torch", "JAX", "in `jit`, XLA's interface", "in `jit`, callback"]
    return table(head, rows, "lrrrrr")


def decode_step() -> str:
    found = load("decode_step")
    rows = [
        [row["weights"], f"{row['stored_mb']} MB", f"{row['ms']:.0f} ms", times(row["times_bf16"])]
        for row in found["rows"]
    ]
    about = f"{found['parameters'] / 1e6:.0f} million parameters, {found['machine']['cores']} cores of an "
    about += f"{found['machine']['cpu']}:\n\n"
    return about + table(["weights", "files", "a token", "as fast"], rows, "lrrr")


def convert() -> str:
    report = load("convert")
    names = {"copy": "a copy of the same bytes", "breccia": "`breccia convert`"}
    rows = [
        [names.get(name, f"{name} {report['peer']}"), f"{report['seconds'][name]:.2f} s", f"{speed:.2f} GB/s"]
        for name, speed in report["gb_per_s_written"].items()
    ]
    return table(["", "time", "written"], rows, "lrr")


def first_calls() -> str:
    return first_calls_table([load(path.stem) for path in sorted(RESULTS.glob("first_call*.json"))])


def first_calls_table(results: list[dict[str, Any]]) -> str:
    """A row for each device and recipe, a column for each step."""
    steps = list(results[0]["rows"][0]["ms"])
    rows = [
        [of["machine"]["device"], f"`{row['recipe']}`", *(duration(row["ms"][step]) for step in steps)]
        for of in results
        for row in of["rows"]
    ]
    return table(["device", "recipe", *steps], rows, "ll" + "r" * len(steps))


def duration(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.0f} ms" if ms >= 10 else f"{ms:.2f} ms"


def large_header() -> str:
    return large_header_table(load("large_header"))


def large_header_table(results: dict[str, Any]) -> str:
    rows = [[r["reader"], f"{r['seconds']:.1f} s", f"{r['bytes'] / 1e9:.2f} GB"] for r in results["rows"]]
    said = f"{results['tensors']:,} tensors, a header of {results['header_bytes'] / 1e6:.1f} MB"
    return table([said, "processor time", "peak memory"], rows, "lrr")


def fuzzing() -> str:
    told = {"codecs": "codecs", "tensors": "ScaledTensors and verbs", "c_abi": "C functions", "files": "checkpoints"}
    rows = []
    for name, one in load("fuzzing").items():
        rows.append(
            [told[name], f"{one['executions']:,}", f"{one['seconds'] / 60:.0f} min", f"{one['reached']:,}"]
        )  # fmt: skip
    return table(["", "executions", "time", "branches reached"], rows, "lrrr")


def import_time() -> str:
    """A sentence."""
    found = load("import_time")
    best, median, rounds = found["best_ms"], found["median_ms"], found["rounds"]
    return (
        f"`import breccia` takes {best:.0f} ms over NumPy's own import, the best of {rounds} (median: {median:.0f} ms)."
    )


def gguf_speed() -> str:
    """A sentence."""
    found = [row["weights_per_s"] / 1e6 for row in load("gguf_speed")["rows"]]
    return f"One core makes K-quants of {min(found):.1f} to {max(found):.1f} million weights a second." + measured(
        "gguf_speed"
    )


def model_size() -> str:
    return model_size_table(load("model_size"))


def model_size_table(results: dict[str, Any]) -> str:
    rows = []
    for name, sizes in results["bytes"].items():
        before, after = (f"{size / 1e6:.1f} MB" for size in sizes)
        less = f", {1 - sizes[1] / sizes[0]:.0%} less".replace("%", " %") if name == "all" else ""
        rows.append([name, before, after + less])
    return table([results["model"], "before", f"after `--to {results['to']}`"], rows, "lrr")
