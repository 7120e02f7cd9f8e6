# SPDX-License-Identifier: Apache-2.0
"""TRL's SFT over SmolLM2 in NVFP4, cut to two layers, a few steps on a CPU."""

import lora_peer
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")
peft = lora_peer.peft()
STEPS = 5


@pytest.fixture(autouse=True)
def _only_whole_peers(monkeypatch):
    lora_peer.hide(monkeypatch)


@pytest.fixture(autouse=True)
def _a_state_of_its_own():
    """accelerate keeps one for a process, which another test may have set."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.filterwarnings("ignore")  # of TRL's, PEFT's and transformers' own words to each other
def test_supervised_fine_tuning(smollm2_folder, tmp_path):
    """SFTTrainer puts LoRA over the codes, learns text, and leaves the codes alone; its adapter is loaded again."""
    trl = pytest.importorskip("trl")
    import breccia.peft
    from breccia.nn import QuantizedLinear
    from datasets import Dataset

    model, tokenizer = lora_peer.smollm2(smollm2_folder, 2)
    breccia.quantize_(model, "nvfp4", lambda layer, name: name != "lm_head")
    before = {name: module.weight for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    codes = {name: weight.data.view(torch.uint8).clone() for name, weight in before.items()}
    line = "A list is a mutable sequence of objects, a tuple an immutable one."
    settings = trl.SFTConfig(
        output_dir=str(tmp_path / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        max_length=32,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        gradient_checkpointing=True,
        dataset_num_proc=None,
        disable_tqdm=True,
    )
    trainer = trl.SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict({"text": [line] * 2 * STEPS}),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    assert losses[-1] < 0.8 * losses[0], losses

    tuned = trainer.model
    layers = [module for module in tuned.modules() if isinstance(module, breccia.peft.QuantizedLora)]
    assert len(layers) == 2 * 3
    for name, module in tuned.named_modules():
        if isinstance(module, QuantizedLinear):
            inside = name.removeprefix("base_model.model.").removesuffix(".base_layer")
            assert torch.equal(module.weight.data.view(torch.uint8), codes.pop(inside)), name
    assert not codes

    trainer.save_model(tmp_path / "adapter")
    ids = tokenizer(line, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = tuned.eval()(input_ids=ids).logits
        fresh, _ = lora_peer.smollm2(smollm2_folder, 2)
        breccia.quantize_(fresh, "nvfp4", lambda layer, name: name != "lm_head")
        again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
        torch.testing.assert_close(again(input_ids=ids).logits, wanted, rtol=1e-5, atol=1e-5)
