# SPDX-License-Identifier: Apache-2.0
"""README's picture: what goes into breccia and what comes out, around one tensor. Its colours follow the reader's."""

from __future__ import annotations

WIDTH, HEIGHT, TOP, LINE = 860, 346, 58, 31  # LINE is the distance between two names
READS = (  # what it is called, and what of it is read
    ("float checkpoints", "bf16, fp16, fp32"),
    ("compressed-tensors", "FP8, MX, NVFP4, INT"),
    ("ModelOpt, Quark", "FP8, MX, NVFP4, INT4"),
    ("DeepSeek, Qwen, gpt-oss", "FP8, MXFP4"),
    ("torchao, TransformerEngine", "FP8, MX, NVFP4, INT"),
    ("GPTQ, AWQ, auto-round", "INT2 … INT8"),
    ("GGUF", "Q2_K … Q8_0, MXFP4"),
    ("MLX, ComfyUI, ONNX", "FP8, MX, NVFP4, INT"),
    ("bitsandbytes", "values"),
)
WRITES = (  # who opens it, and the format
    ("vLLM, SGLang", "compressed-tensors, ModelOpt"),
    ("transformers", "bf16, torchao, DeepSeek"),
    ("llama.cpp", "GGUF"),
    ("ComfyUI", "FP8, MXFP8, NVFP4"),
    ("diffusers", "breccia's own files"),
    ("mlx-lm", "MLX"),
    ("ONNX Runtime, OpenVINO", "ONNX"),
    ("torch, JAX, NumPy, MLX", "arrays in memory"),
    ("C++ and C", "the same bytes"),
)
VERBS = ("convert · inspect", "verify · evaluate", "calibrate · GPTQ", "train · LoRA", "linear · matmul")
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328; }
.note { font-size: 11px; fill: #59636e; }
.head { font-weight: 600; }
.line { stroke: #afb8c1; fill: none; }
.page { fill: #ffffff; }
.card { fill: #f6f8fa; stroke: #afb8c1; }
.code { fill: #1f5f8b; } .scale { fill: #c0562f; }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117; } text { fill: #e6edf3; } .note { fill: #9198a1; }
.line { stroke: #57606a; } .card { fill: #151b23; stroke: #57606a; }
.code { fill: #4a9bd4; } .scale { fill: #e07b53; }
}
"""


def overview() -> str:
    """The text of the picture."""
    left, right = 322, 538  # the card of the tensor
    parts = [
        f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
        _text(16, 30, "reads", "head"),
        _text(WIDTH - 16, 30, "writes for", "head", "end"),
        _text((left + right) / 2, 30, "one tensor", "head", "middle"),
        f'<rect class="card" x="{left}" y="42" width="{right - left}" height="{HEIGHT - 56}" rx="8"/>',
        *_tensor(left + 22, 62),
    ]
    middle = TOP + LINE * (len(READS) - 1) / 2
    for i, (reads, writes) in enumerate(zip(READS, WRITES, strict=True)):
        y = TOP + LINE * i
        parts += [_text(16, y, reads[0]), _text(16, y + 13, reads[1], "note")]
        parts += [_text(WIDTH - 16, y, writes[0], "", "end"), _text(WIDTH - 16, y + 13, writes[1], "note", "end")]
        for a, b in ((210, left), (WIDTH - 200, right)):
            half = (a + b) / 2
            parts.append(f'<path class="line" d="M{a} {y} C{half} {y} {half} {middle} {b} {middle}"/>')
    for i, verb in enumerate(VERBS):
        parts.append(_text((left + right) / 2, 222 + 21 * i, verb, "note", "middle"))
    body = "\n".join(parts)
    about = (
        "Formats that breccia reads, one tensor of codes, scales and a recipe, and programs that open what it writes"
    )
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{about}">'
    return f"{head}\n<style>{STYLE}</style>\n{body}\n</svg>\n"


def _text(x: float, y: float, what: str, kind: str = "", anchor: str = "start") -> str:
    kinds = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{kinds} text-anchor="{anchor}">{what}</text>'


def _tensor(x: int, y: int) -> list[str]:
    """Codes in blocks, a scale before each block, and what else travels with them."""
    parts = []
    for row in range(4):
        for block in range(2):
            start = x + 86 * block
            parts.append(f'<rect class="scale" x="{start}" y="{y + 16 * row}" width="10" height="11" rx="2"/>')
            for i in range(6):
                at = start + 15 + 11 * i
                parts.append(f'<rect class="code" x="{at}" y="{y + 16 * row}" width="9" height="11" rx="1"/>')
    return [
        *parts,
        _text(x + 86, y + 84, "codes of 4 to 8 bits", "", "middle"),
        _text(x + 86, y + 102, "scales · zero points", "", "middle"),
        _text(x + 86, y + 120, "recipe · layout", "", "middle"),
    ]
