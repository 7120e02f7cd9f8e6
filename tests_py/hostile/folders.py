# SPDX-License-Identifier: Apache-2.0
"""Directories: indices, links, pipes and devices, config.json."""

from __future__ import annotations

import json
from typing import Any

from hostile import Content, Hostile, fifo, folder, later, link
from hostile.headers import stored

A = stored(json.dumps({"a.weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}), bytes(64))
B = A.replace(b"a.weight", b"b.weight")
INDEX = "model.safetensors.index.json"


def indexed(weight_map: Any, says: str, **files: Content) -> Hostile:
    """A directory of shards a.safetensors and b.safetensors, whose index says something."""
    said = {"weight_map": weight_map}
    named = {name.replace("__", "."): content for name, content in files.items()}
    return Hostile({INDEX: json.dumps(said).encode(), "a.safetensors": A, "b.safetensors": B, **named}, says)


def index(content: Content, says: str) -> Hostile:
    return Hostile({INDEX: content, "a.safetensors": A}, says)


def config(content: Content, says: str, name: str = "config.json") -> Hostile:
    return Hostile({name: content, "a.safetensors": A}, says)


def shard(content: Content, says: str) -> Hostile:
    return Hostile({"a.safetensors": A, "b.safetensors": content}, says)


def many(count: int, entry: str) -> Content:
    """An index of so many entries, of their numbers."""
    return later(lambda: b'{"weight_map":{' + ",".join(entry % {"i": i} for i in range(count)).encode() + b"}}")


BOTH = {"a.weight": "a.safetensors", "b.weight": "b.safetensors"}
CASES: dict[str, Hostile] = {
    "good": indexed(BOTH, ""),
    "nothing": Hostile({"readme": b""}, "there are none", directory=True),
    "weight_map empty": indexed({}, "it is empty"),
    "weight_map null": indexed(None, "weight_map must map"),
    "weight_map a list": indexed(["a.safetensors"], "weight_map must map"),
    "weight_map of numbers": indexed({"a.weight": 1}, "weight_map must map"),
    "weight_map missing": index(b"{}", "weight_map must map"),
    "index a list": index(b"[]", "JSON object"),
    "index not JSON": index(b"{", "must be JSON"),
    "index not UTF-8": index(b"\xff", "must be JSON"),
    "index deep": index(b"[" * 100_000, "must be JSON"),
    "index empty": index(b"", "must be JSON"),
    "index of lists": index(later(lambda: b"[" + b"[]," * 20_000_000 + b"[]]"), "must have at most"),
    "index of objects": index(later(lambda: b"[" + b"{}," * 2_000_000 + b"{}]"), "must have at most"),
    "index of numbers": index(later(lambda: b"[" + b"12345," * 6_000_000 + b"0]"), "must have at most"),
    "index of as many strings as it may have": index(
        later(lambda: b'["' + b'","'.join([b"ab"] * 3_000_000) + b'"]'), "JSON object"
    ),
    "index of as many lists as it may have": index(later(lambda: b"[" + b"[]," * 1_000_000 + b"[]]"), "JSON object"),
    "index of a million shards": index(many(1_000_000, '"t%(i)d":"f%(i)d.safetensors"'), "must have at most"),
    "index of as many shards as its JSON may name": index(
        many(786_431, '"t%(i)d":"f%(i)d.safetensors"'), "must name at most 65536 files"
    ),
    "index of as many shards as it may name": index(many(65_536, '"t%(i)d":"f%(i)d.safetensors"'), "No such file"),
    "index of as many tensors as its JSON may name": index(
        many(786_431, '"t%(i)d":"a.safetensors"'), "as weight_map says"
    ),
    "index a directory": index(folder, "regular file"),
    "index a pipe": index(fifo, "regular file"),
    "index without end": index(link("/dev/zero"), "regular file"),
    "index a link to itself": index(link(INDEX), "symbolic links"),
    "index a link to nothing": index(link("gone"), "No such file"),
    "tensor in another shard": indexed({"a.weight": "b.safetensors"}, "as weight_map says"),
    "tensor in none": indexed({**BOTH, "c.weight": "a.safetensors"}, "as weight_map says"),
    "shard missing": indexed({**BOTH, "c.weight": "c.safetensors"}, "No such file"),
    "tensor in two": indexed(BOTH, "must be in one file", b__safetensors=A),
    **{
        f"shard {name!r}": indexed({"a.weight": name}, "names in its directory|must be of tensors")
        for name in (
            "../a.safetensors",
            "/etc/passwd",
            "",
            ".",
            "..",
            "./a.safetensors",
            "x/a.safetensors",
            ".a",
            "a\0b",
        )
    },
    "shard config.json": indexed({"a.weight": "config.json"}, "must be of tensors"),
    "shard the index": indexed({"a.weight": INDEX}, "must be of tensors"),
    "shard with an escape sequence": indexed({"a.weight": "\x1b[31m.safetensors"}, r"\\x1b"),
    "shard a pipe": shard(fifo, "regular file"),
    "shard a directory": shard(folder, "regular file"),
    "shard without end": shard(link("/dev/zero"), "regular file"),
    "shard a link to nothing": shard(link("gone"), "No such file"),
    "shard a link to itself": shard(link("b.safetensors"), "symbolic links"),
    "shard a link to another": shard(link("a.safetensors"), "must be in one file"),
    "shard a link outside": shard(link("/etc/passwd"), "b.safetensors: "),
    "shard empty": shard(b"", "at least 8 bytes"),
    "config a list": config(b"[]", "JSON object"),
    "config not JSON": config(b"{'a'}", "must be JSON"),
    "config of lists": config(later(lambda: b'{"a":[' + b"[]," * 20_000_000 + b"[]]}"), "must have at most"),
    "config of three million members": config(
        later(lambda: b"{" + b",".join(b'"%x":1' % i for i in range(3_000_000)) + b"}"), "must have at most"
    ),
    "config deep": config(b'{"a":' * 100_000, "must be JSON"),
    "config a pipe": config(fifo, "regular file"),
    "config a directory": config(folder, "regular file"),
    "config without end": config(link("/dev/zero"), "regular file"),
    "config a link to nothing": config(link("gone"), "No such file"),
    "hf_quant_config a pipe": config(fifo, "regular file", "hf_quant_config.json"),
    "hf_quant_config a list": config(b"[]", "JSON object", "hf_quant_config.json"),
    "hf_quant_config of a list": config(b'{"quantization":[1]}', "", "hf_quant_config.json"),
    "tokenizer a pipe": config(fifo, "", "tokenizer.json"),
    "tokenizer a link to nothing": config(link("gone"), "", "tokenizer.json"),
    "tokenizer without end": config(link("/dev/zero"), "", "tokenizer.json"),
    "files called as work is": config(b"x", "", "journal"),
    **{
        f"quantization_config {text}": config(
            f'{{"quantization_config":{text}}}'.encode(), "quantization_config in config.json must be an object"
        )
        for text in ("1", "[]", '"gptq"')
    },
    **{
        f"quantization_config {text}": config(f'{{"quantization_config":{text}}}'.encode(), "")
        for text in (
            "{}",
            '{"quant_method":[]}',
            '{"quant_method":{"a":1}}',
            '{"quant_method":"\\u001b"}',
        )
    },
}

LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 8,
}
LAYER = stored(
    json.dumps(
        {"model.layers.0.self_attn.q_proj.weight": {"dtype": "F32", "shape": [32, 32], "data_offsets": [0, 4096]}}
    ),
    bytes(4096),
)


def llama(text: str | None = None, tokenizer: bytes = b"{}", **changes: Any) -> Hostile:
    """A model whose config.json goes into a GGUF file's metadata, or is said not to."""
    raw = (text or json.dumps({**LLAMA, **changes})).encode()
    return Hostile({"config.json": raw, "tokenizer.json": tokenizer, "a.safetensors": LAYER}, "", ("gguf:q8_0",))


CASES |= {
    f"llama, {key} {value!r}": llama(**{key: value})
    for key in LLAMA
    if key != "model_type"
    for value in (0, -1, None, "x")
}
CASES |= {f"llama, {key} 1e999": llama(json.dumps({**LLAMA, key: "@"}).replace('"@"', "1e999")) for key in LLAMA}
CASES |= {
    f"llama, {key} {value!r}"[:80]: llama(**{key: value})
    for key, value in (
        ("hidden_size", 2**40),
        ("vocab_size", 2**63),
        ("num_attention_heads", [1]),
        ("num_attention_heads", True),
        ("head_dim", -5),
        ("head_dim", {}),
        ("rope_scaling", [1]),
        ("rope_scaling", "linear"),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", {"type": "linear", "factor": "x"}),
        ("rope_scaling", {"type": {}}),
        ("rope_theta", "x"),
        ("rope_theta", 1e308),
        ("rope_parameters", 3),
        ("text_config", 3),
        ("model_type", {}),
    )
}
CASES |= {
    f"tokenizer {text}"[:80]: llama(tokenizer=text.encode())
    for text in (
        "[]",
        "{",
        '{"model":{"type":"BPE","vocab":{"a":-1}}}',
        '{"model":{"type":"BPE","vocab":{"a":1e999}}}',
        '{"model":{"type":"BPE","vocab":{"a":4000000000},"merges":[]},"pre_tokenizer":"ByteLevel"}',
        '{"model":{"type":"BPE","vocab":{},"merges":[]},"pre_tokenizer":"ByteLevel"}',
        '{"model":{"type":"BPE","vocab":{"a":0},"merges":[[1,2]]},"pre_tokenizer":"ByteLevel"}',
        '{"model":{"type":"WordPiece","vocab":{"a":0}},"added_tokens":[{"id":0}]}',
        '{"model":{"type":"BPE","vocab":{"\\ud800":0},"merges":[]},"pre_tokenizer":"ByteLevel"}',
        '{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"pre_tokenizer":"ByteLevel","post_processor":{"processors":[1]}}',
        '{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"pre_tokenizer":"ByteLevel","post_processor":{"single":[1]}}',
    )
}

# Numbers that say how often something is to be done, or how much memory is to be had.
MANY = 10**9
BYTE_LEVEL = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Split", "pattern": {"Regex": SPLIT}}, {"type": "ByteLevel"}],
}
TOKENIZER = json.dumps({"model": BYTE_LEVEL, "pre_tokenizer": PRE}).encode()
CASES |= {
    f"{kind} of a billion layers, layer_types {types!r}": llama(
        model_type=kind, num_hidden_layers=MANY, query_pre_attn_scalar=16, **({"layer_types": types} if types else {})
    )
    for kind in ("gpt_oss", "gemma2", "gemma3_text")
    for types in (None, [], ["full_attention"])
}
CASES |= {
    f"{size} tokens": llama(vocab_size=size, tokenizer=TOKENIZER, bos_token_id=0, eos_token_id=0)
    for size in (1 << 20, 1 << 24, 1 << 31)
}
CASES |= {
    f"{key} of a billion": Hostile(
        {
            "config.json": json.dumps({"model_type": kind, "architectures": [name], key: value}).encode(),
            "a.safetensors": A,
        },
        "",
    )
    for kind, name, key, value in (
        ("llama", "LlamaForCausalLM", "num_hidden_layers", MANY),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", "vision_config", {"depth": MANY}),
        ("swin", "SwinModel", "depths", [2, MANY]),
        ("convnext", "ConvNextModel", "depths", [2, MANY]),
        ("mixtral", "MixtralForCausalLM", "num_local_experts", MANY),
    )
}


def shaped(name: str, shape: list[int], says: str, to: tuple[str, ...] = ("mxfp8", "bf16", "gguf:q8_0")) -> Hostile:
    """A model of one tensor that takes no bytes, or one a row."""
    count = 1
    for extent in shape:
        count *= extent
    header = {name: {"dtype": "I8" if count else "BF16", "shape": shape, "data_offsets": [0, count]}}
    files: dict[str, Content] = {
        "config.json": json.dumps(LLAMA).encode(),
        "a.safetensors": stored(json.dumps(header), bytes(count)),
    }
    return Hostile(files, says, to)


EXPERTS = "model.layers.0.mlp.switch_mlp.up_proj.weight"
CASES |= {
    "experts without elements": shaped(EXPERTS, [2**40, 0, 4], "rows without elements"),
    "a million experts": shaped(EXPERTS, [1_000_000, 1, 1], "experts must be at most"),
    "twenty thousand experts without elements": shaped(EXPERTS, [20_000, 0, 4], ""),
    "rows without elements, in another order": shaped(
        "model.layers.0.self_attn.q_proj.weight", [2**40, 0], "rows without elements"
    ),
    "as many rows without elements as there may be": shaped("model.layers.0.self_attn.q_proj.weight", [2**20, 0], ""),
    "matrices without elements": shaped("x.weight", [2**20, 0, 4], ""),
    "columns alone": shaped("x.weight", [0, 2**40], ""),
}
for name in ("tokenizer []", "tokenizer {"):
    CASES[name] = Hostile(CASES[name].files, "JSON", ("gguf:q8_0",))
