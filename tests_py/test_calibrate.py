# SPDX-License-Identifier: Apache-2.0
"""Moments of a model's inputs: what is summed, shared, masked, kept within memory and gone on with."""

import json
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import breccia  # noqa: E402
from breccia.calibration.levels import choose  # noqa: E402
from breccia.moments import load_moments  # noqa: E402
from tiny_models import SIZES, random_model, transformers  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:more data is needed")


class Attention(torch.nn.Module):
    """q, k and v of one input, and o of what they make."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x, attention_mask=None):
        return self.o_proj(self.q_proj(x) + self.k_proj(input=x) * self.v_proj(x))


def attention():
    torch.manual_seed(0)
    return Attention()


def batches_of(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, 32, generator=generator) for shape in shapes]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("level", ["diag", "block", "full"])
def test_sums_are_those_of_all_rows_at_once(level, dtype):
    batches = batches_of((2, 5), (3, 7), (1, 1), (40,))
    found = breccia.calibrate(attention(), batches, level, dtype=dtype)
    x = torch.cat([b.reshape(-1, 32) for b in batches]).double().numpy()
    moments = found["q_proj"]
    whole = x.T @ x
    close = {"rtol": 1e-5 if dtype == "float32" else 1e-7, "atol": 1e-4 if dtype == "float32" else 1e-6}
    assert moments.level == level and moments.count == len(x) == 72
    np.testing.assert_allclose(moments.diag, np.diag(whole), **close)
    assert moments.amax == np.abs(x).max() and np.array_equal(moments.column_amax, np.abs(x).max(0))
    if level == "full":
        np.testing.assert_allclose(moments.full, whole, **close)
        assert np.array_equal(moments.full, moments.full.T)
    if level == "block":
        np.testing.assert_allclose(moments.block, [whole[:16, :16], whole[16:, 16:]], **close)
        assert np.array_equal(moments.block, moments.block.swapaxes(1, 2))


def test_layers_of_one_tensor_share_and_others_do_not():
    model, (batch,) = attention(), batches_of((4, 9))
    found = breccia.calibrate(model, [batch])
    assert list(found) == ["q_proj", "k_proj", "v_proj", "o_proj"]
    assert found["q_proj"] is found["k_proj"] is found["v_proj"] is not found["o_proj"]
    assert found.report["inputs"] == {"diag": 0, "block": 0, "full": 2}
    x = batch.reshape(-1, 32)
    inner = (model.q_proj(x) + model.k_proj(x) * model.v_proj(x)).detach()
    np.testing.assert_allclose(found["o_proj"].full, inner.mT @ inner, rtol=1e-4, atol=1e-4)
    expected = {name: model.get_submodule(name)(x).abs().max().item() for name in ("k_proj", "v_proj")}
    assert found.output_amax == pytest.approx(expected)


def test_a_tensor_changed_in_place_is_another_input():
    class Changed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            return y + self.b(x.mul_(2))

    x = torch.ones(3, 4)
    found = breccia.calibrate(Changed(), [x.clone(), x.clone()])
    assert found["a"].diag[0] in (6.0, 15.0)  # the first batch is run twice, and this model changes what it is given
    assert found["b"].diag[0] > found["a"].diag[0]


def test_padding_is_not_counted():
    model, (x,) = attention(), batches_of((2, 6))
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1]])
    loud = torch.where(mask[..., None] == 1, x, 1000.0)
    masked = breccia.calibrate(model, [{"x": loud, "attention_mask": mask}])
    plain = breccia.calibrate(model, [x[mask == 1]])
    assert masked["o_proj"].count == masked.report["tokens"] == 8
    for name in plain:
        for part, array in plain[name].arrays().items():
            np.testing.assert_allclose(masked[name].arrays()[part], array, rtol=1e-5, atol=1e-4)
    assert masked.output_amax == pytest.approx(plain.output_amax, rel=1e-5)


def test_padding_that_cannot_be_told_is_refused():
    class Flat(Attention):
        def forward(self, x, attention_mask=None):
            return super().forward(x.reshape(-1, 32)[1:])

    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    with pytest.raises(ValueError, match=r"batches must have no padding where q_proj is given rows of \(5, 32\)"):
        breccia.calibrate(Flat(), [{"x": torch.ones(2, 3, 32), "attention_mask": mask}])


def test_memory_decides_the_level():
    widths = {"a": 64, "b": 128, "c": 64}
    full = {name: 4 * k * (k + 1) for name, k in widths.items()}
    assert choose(widths, "full", sum(full.values()), 16, 4).levels == dict.fromkeys(widths, "full")
    less = choose(widths, "full", sum(full.values()) - 1, 16, 4)
    assert less.levels == {"a": "full", "b": "block", "c": "full"}
    assert less.notes == (
        "1 inputs (K = 128) are kept at block: all that was asked for takes 99,328 bytes, memory is 99,327",
    )
    assert choose(widths, "full", 4 * 256, 16, 4).levels == dict.fromkeys(widths, "diag")
    assert choose({"a": 40}, "full", 200, 16, 4).levels == {"a": "diag"}
    with pytest.raises(ValueError, match="memory must be enough for the least that is kept, got 1,023"):
        choose(widths, "full", 1023, 16, 4)
    for memory in range(1024, 100_000, 701):
        chosen = choose(widths, "full", memory, 16, 4).levels
        used = sum({"full": full[n], "block": 4 * k * 17, "diag": 4 * k}[chosen[n]] for n, k in widths.items())
        assert used <= memory
    found = breccia.calibrate(attention(), batches_of((4, 9)), memory=32 * 33 * 4 + 32 * 17 * 4)
    assert sorted(m.level for m in {id(m): m for m in found.values()}.values()) == ["block", "full"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("level", ["block", "full"])
def test_going_on_gives_the_same_bytes(tmp_path, level, dtype):
    model, batches = attention(), batches_of((2, 5), (3, 7), (4, 4), (2, 9))
    whole = breccia.calibrate(model, batches, level, dtype=dtype)
    state = tmp_path / "state"
    for stop in (1, 3):

        def some(end=stop):
            yield from batches[:end]
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            breccia.calibrate(model, some(), level, dtype=dtype, state=state, state_seconds=0)
        assert state.exists()
    with pytest.raises(ValueError, match="state must be of these batches, it is of others"):
        breccia.calibrate(model, batches[::-1], level, dtype=dtype, state=state)
    with pytest.raises(ValueError, match="state must be of these batches, of which there are 2"):
        breccia.calibrate(model, batches[:2], level, dtype=dtype, state=state)
    with pytest.raises(ValueError, match="state must be of the same model, level, memory and dtype"):
        breccia.calibrate(model, batches, "diag", dtype=dtype, state=state)
    gone_on = breccia.calibrate(model, batches, level, dtype=dtype, state=state)
    assert not state.exists()
    for path, found in (("a", whole), ("b", gone_on)):
        found.save(tmp_path / path)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_has_all_of_it(tmp_path):
    found = breccia.calibrate(attention(), batches_of((4, 9)))
    found.save(tmp_path / "m", {"text": "none"})
    with load_moments(tmp_path / "m") as file:
        assert sorted(file) == sorted(found) and file.metadata["text"] == "none"
        assert np.array_equal(file["v_proj"].full, found["q_proj"].full)
        assert json.loads(file.metadata["breccia.calibration.output_amax"]) == found.output_amax
        assert json.loads(file.metadata["breccia.calibration.report"]) == found.report


@pytest.mark.filterwarnings("default")
def test_too_few_rows_are_warned_of():
    with pytest.warns(UserWarning, match=r"2 of 2 inputs have seen fewer than 4 K rows, the least has 127 for K = 32"):
        breccia.calibrate(attention(), batches_of((127,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        breccia.calibrate(attention(), batches_of((128,)))


def test_the_model_is_left_as_it_was():
    model = torch.nn.Sequential(attention(), torch.nn.Dropout(0.9), torch.nn.Linear(32, 4))
    model.train()
    model[0].eval()
    (batch,) = batches_of((4, 9))
    found = breccia.calibrate(model, [batch])
    assert model.training and model[1].training and not model[0].training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    inner = model[0](batch).reshape(-1, 32)  # without dropout
    np.testing.assert_allclose(found["2"].diag, inner.detach().square().sum(0), rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "batches", "options", "error", "message"),
    [
        (None, [], {}, TypeError, "model must be a torch.nn.Module, got NoneType"),
        (torch.nn.ReLU(), [torch.ones(1)], {}, ValueError, "model must have a torch.nn.Linear, ReLU has none"),
        (Attention(), [], {}, ValueError, "batches must have at least one, got none"),
        (Attention(), [], {"level": "most"}, ValueError, "level must be 'diag', 'block' or 'full', got 'most'"),
        (Attention(), [], {"dtype": "float16"}, ValueError, "dtype must be 'float32' or 'float64', got 'float16'"),
        (Attention(), [], {"memory": "8GiB"}, TypeError, "memory must be an integer, got '8GiB'"),
        (Attention(), [], {"block": 0}, ValueError, "block must be 1 or more, got 0"),
        (Attention(), [torch.full((1, 32), torch.nan)], {}, ValueError, "inputs of q_proj must be finite"),
        (
            Attention(),
            [{"x": torch.ones(1, 2, 32), "attention_mask": torch.zeros(1, 1, 2, 2)}],
            {},
            ValueError,
            r"attention_mask must be \(batch, tokens\), got shape \(1, 1, 2, 2\)",
        ),
    ],
)
def test_bad_input_is_named(model, batches, options, error, message):
    with pytest.raises(error, match=message):
        breccia.calibrate(model, batches, **options)


def test_a_way_that_changes_is_refused():
    class Changing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.a(x) + self.b(x if len(x) == 1 else x + 1)

    with pytest.raises(ValueError, match="b and a had one input in the first, and have not in batch 1"):
        breccia.calibrate(Changing(), [torch.ones(1, 4), torch.ones(2, 4)])


class Experts(torch.nn.Module):
    """A router and three experts, of which each row goes to one."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(32, 3)
        self.experts = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {"gate_proj": torch.nn.Linear(32, 48), "up_proj": torch.nn.Linear(32, 48)}
                | {"down_proj": torch.nn.Linear(48, 32)}
            )
            for _ in range(3)
        )

    def forward(self, x, chosen):
        self.gate(x)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if len(rows := x[chosen == number]):
                inner = expert["gate_proj"](rows) * expert["up_proj"](rows)
                out[chosen == number] = expert["down_proj"](inner)
        return out


def test_each_expert_has_its_own_never_a_full_one():
    torch.manual_seed(0)
    (x,) = batches_of((30,))
    first, second = torch.zeros(30, dtype=torch.long), torch.arange(30) % 2  # no row goes to the third expert
    found = breccia.calibrate(Experts(), [(x, first), (x, second)])
    assert found["gate"].level == "full" and found["gate"].count == 60
    for number, rows in ((0, torch.cat([x, x[::2]])), (1, x[1::2]), (2, x[:0])):
        of = [found[f"experts.{number}.{part}"] for part in ("gate_proj", "up_proj", "down_proj")]
        assert of[0] is of[1] is not of[2] and of[0].level == of[2].level == "block"
        assert of[0].count == of[2].count == len(rows)
        np.testing.assert_allclose(of[0].diag, rows.square().sum(0), rtol=1e-5)
    notes = " ".join(found.report["notes"])
    assert "6 inputs of experts are kept at block" in notes
    assert "2 inputs of experts have seen no token, the first: experts.2.gate_proj" in notes


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen3Moe"])
def test_transformers_models(family):
    more = {"Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}}
    transformers()
    if family == "GPT2":
        config = transformers().GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=320, n_positions=64)
        model = transformers().GPT2LMHeadModel(config)
    else:
        model = random_model(family, more.get(family, {}))
    batch = {"input_ids": torch.arange(3, 43).reshape(2, 20)}
    found = breccia.calibrate(model, [batch, batch])
    assert found.report["tokens"] == 80
    weights = {name.removesuffix(".weight") for name in model.state_dict()}
    assert set(found) <= weights
    assert not any("keep experts in one tensor" in note for note in found.report["notes"])
    if family == "GPT2":
        table = found["transformer.wte"]  # of the head, which has the embedding's weight
        assert "lm_head" not in found and (table.columns, table.count, table.level) == (128, 80, "full")
        layer = "transformer.h.1.mlp.c_proj"
        assert found[layer].columns == model.get_submodule(layer).weight.shape[0] == 512
        return
    at = "model.layers.1.self_attn."
    assert found[f"{at}q_proj"] is found[f"{at}k_proj"] is found[f"{at}v_proj"]
    assert set(found.output_amax) == {f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "kv"}
    if family == "Llama":
        mlp = "model.layers.0.mlp."
        assert found[f"{mlp}gate_proj"] is found[f"{mlp}up_proj"] is not found[f"{mlp}down_proj"]
        assert found["lm_head"].columns == SIZES["hidden_size"]


def fused(name):
    """A model with experts in one parameter, in float32, that gives each expert some tokens."""
    from tiny_models import FUSED, MODELS

    family, more = {**MODELS, **FUSED}[name]
    kinds = {"layer_types": more["layer_types"][:1]} if "layer_types" in more else {}
    return random_model(family, {**more, **kinds, "num_hidden_layers": 1}).float()


def rows_by_hand(model, batch):
    """What each expert of each parameter is multiplied with: of the module's own inputs and choices."""
    (name, experts), *others = [(n, m) for n, m in model.named_modules() if hasattr(m, "gate_up_proj")]
    assert not others
    taken = []
    hook = experts.register_forward_pre_hook(lambda _, args, named: taken.append((args, named)), with_kwargs=True)
    with torch.no_grad():
        model(**batch)
    hook.remove()
    ((args, named),) = taken
    values = [*args, *named.values()]
    hidden = values[0]
    if len(values) == 1:  # Llama 4: each expert's rows one after the other, zeros for those it was not chosen for
        every = hidden.reshape(len(experts.gate_up_proj), -1, hidden.shape[-1])
        return name, [rows[rows.any(-1)] for rows in every]
    chosen = values[1]
    return name, [hidden[(chosen == i).any(-1)] for i in range(len(experts.gate_up_proj))]


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "llama4"])
def test_experts_of_one_parameter_have_each_their_own(name):
    model = fused(name)
    batch = {"input_ids": torch.arange(3, 43).reshape(2, 20)}
    way = model.get_experts_implementation()
    found = breccia.calibrate(model, [batch, batch])
    assert model.get_experts_implementation() == way
    module, wanted = rows_by_hand(model, batch)
    moments = found[f"{module}.gate_up_proj"]
    assert moments.level == "block" and moments.experts == len(wanted) == 4
    assert moments.count.tolist() == [2 * len(rows) for rows in wanted]
    assert found[f"{module}.down_proj"].count.tolist() == moments.count.tolist()
    for number, rows in enumerate(wanted):
        x = rows.double().numpy()
        np.testing.assert_allclose(moments.diag[number], 2 * np.square(x).sum(0), rtol=1e-4, atol=1e-5)
        runs = x.reshape(len(x), -1, 16)
        np.testing.assert_allclose(
            moments.block[number], 2 * np.einsum("nbi,nbj->bij", runs, runs), rtol=1e-4, atol=1e-4
        )
    inner = model.get_submodule(module).down_proj.shape[1 if name != "qwen3-moe" else 2]
    assert found[f"{module}.down_proj"].columns == inner
    assert any("inputs of experts are kept at block" in note for note in found.report["notes"])
    with pytest.raises(ValueError, match=r"batches must have no padding where .* is given rows of tokens"):
        breccia.calibrate(model, [{**batch, "attention_mask": torch.tensor([[1] * 20, [1] * 12 + [0] * 8])}])


def other_row(model):
    next(m for m in model.modules() if isinstance(m, torch.nn.Linear)).weight[1:] *= 2


def other_norm(model):
    next(p for name, p in model.named_parameters() if "weight" not in name or p.ndim == 1).add_(1)


def other_embedding(model):
    model.get_submodule("embed").weight.mul_(3)


@pytest.mark.parametrize("change", [other_row, other_norm, other_embedding])
def test_a_state_is_of_one_whole_model(tmp_path, change):
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("embed", torch.nn.Embedding(16, 32))
    model.add_module("norm", torch.nn.LayerNorm(32))
    model.add_module("layer", torch.nn.Linear(32, 32))
    batches = [torch.arange(8).reshape(1, 8) + i for i in range(3)]
    state = tmp_path / "state"

    def broken():
        yield from batches[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        breccia.calibrate(model, broken(), state=state, state_seconds=0)
    with torch.no_grad():
        change(model)
    with pytest.raises(ValueError, match="state must be of the same model, level, memory and dtype"):
        breccia.calibrate(model, batches, state=state)


def test_experts_of_one_parameter_go_on_from_a_state(tmp_path):
    model = fused("qwen3-moe")
    batches = [{"input_ids": torch.arange(3 + i, 43 + i).reshape(2, 20)} for i in range(3)]
    state = tmp_path / "state"
    whole = breccia.calibrate(model, batches)

    def broken():
        yield from batches[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        breccia.calibrate(model, broken(), state=state, state_seconds=0)
    again = breccia.calibrate(model, batches, state=state, state_seconds=0)
    for name, moments in whole.items():
        for part, array in moments.arrays().items():
            assert np.array_equal(array, again[name].arrays()[part])
    assert again.report == whole.report
    least = breccia.calibrate(model, batches, memory=200_000)
    arrays = [array for m in {id(m): m for m in least.values()}.values() for array in m.arrays().values()]
    sizes = sum(array.nbytes for array in arrays if array.dtype == np.float32 and array.shape not in ((), (4,)))
    assert sizes <= 200_000


def test_moments_of_fused_experts_serve_a_conversion_of_the_files(tmp_path):
    """transformers' files have experts one by one, its models all of a layer in one parameter."""
    from breccia.checkpoint import convert, verify

    model = fused("qwen3-moe")
    model.save_pretrained(tmp_path / "model")
    rows = torch.randint(3, 320, (40, 64), generator=torch.Generator().manual_seed(0))
    found = breccia.calibrate(model, [{"input_ids": row[None]} for row in rows])
    found.save(tmp_path / "m.safetensors")
    options = {"moments": tmp_path / "m.safetensors", "method": "gptq"}
    report = convert(tmp_path / "model", tmp_path / "out", "nvfp4", **options)
    errors = report["output_errors"]
    experts = [name for name in errors if ".experts." in name]
    assert len(experts) == 12 and len(errors) == 16
    assert all(said["output_error"] < said["nearest"] for said in errors.values())
    judged = verify(tmp_path / "model", tmp_path / "out", moments=tmp_path / "m.safetensors", min_sqnr_db=0)
    measured = {tensor["name"]: tensor.get("output_error") for tensor in judged["tensors"]}
    for name in errors:
        assert measured[name] == pytest.approx(errors[name]["output_error"], rel=2e-3)


def test_padding_of_a_transformers_model():
    """Rows of padding change nothing: neither what is counted nor what the others are."""
    model = random_model("Llama", {})
    ids = torch.arange(3, 43).reshape(2, 20)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    other = torch.where(mask == 1, ids, 7)
    found, again = (breccia.calibrate(model, [{"input_ids": i, "attention_mask": mask}]) for i in (ids, other))
    assert found["lm_head"].count == 32
    for name in found:
        np.testing.assert_allclose(found[name].full, again[name].full, rtol=1e-2, atol=1e-2)
