# SPDX-License-Identifier: Apache-2.0
"""accelerate with LoRA on SmolLM2 in NVFP4, cut to two layers, a few steps on a CPU."""

import copy

import lora_peer
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
peft = lora_peer.peft()


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


@pytest.fixture(scope="module")
def quantized(smollm2_folder):
    """The model, which is to be copied, and tokens (4, 32)."""
    with pytest.MonkeyPatch.context() as patch:
        lora_peer.hide(patch)
        import breccia.peft
        from test_peft import text

        model, tokenizer = lora_peer.smollm2(smollm2_folder, 2)
    breccia.quantize_(model, "nvfp4", lambda layer, name: name != "lm_head")
    return model, text(tokenizer, 4, 32)


def wanted():
    return peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
def test_accelerate(quantized, tmp_path):
    """A loop of accelerate's own, in bfloat16, with two batches for a step; its state is saved and comes back."""
    import accelerate

    model, ids = copy.deepcopy(quantized[0]), quantized[1]
    tuned = peft.get_peft_model(model, wanted())
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=2e-3)
    loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=1)
    tuned, optimizer, loader = accelerator.prepare(tuned, optimizer, loader)
    losses = []
    for _ in range(3):
        total = 0.0
        for batch in loader:
            with accelerator.accumulate(tuned):
                loss = tuned(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
        losses.append(total / len(loader))
    assert losses[-1] < losses[0]
    accelerator.save_state(tmp_path / "state")
    learned = {name: p.detach().clone() for name, p in tuned.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, p in tuned.named_parameters():
            if name in learned:
                p.zero_()
    accelerator.load_state(tmp_path / "state")
    for name, p in tuned.named_parameters():
        if name in learned:
            assert torch.equal(p, learned[name]), name
