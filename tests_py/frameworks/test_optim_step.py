# SPDX-License-Identifier: Apache-2.0
"""The kernel of `breccia.optim.AdamW`: what it computes, and that its bytes are the same everywhere."""

import breccia
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from breccia import _core  # noqa: E402
from breccia.frameworks.torch.tensors import core_array  # noqa: E402
from breccia.optim import AdamW  # noqa: E402
from breccia.recipes import _spec  # noqa: E402

STATES = ("fp8", "int8", "mxfp8")
EXPANDED = {"fp8": "float8_e4m3fn", "int8": "int8"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BETAS = (0.9, 0.999)


def gradient(shape, seed):
    """Of many magnitudes, with rows of zeros, of subnormal numbers, and of one number alone."""
    draw = torch.Generator().manual_seed(seed)
    g = torch.randn(shape, generator=draw) * 10.0 ** torch.randint(-6, 1, shape, generator=draw)
    g[:9] = 0
    g[9:12] *= 1e-38
    g[12:16] = 0.25
    return g


def made(states, dtype=torch.float32, shape=(70, 101), steps=3, start=None, **options):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape).to(dtype))
    optimizer = AdamW([p], lr=1e-2, betas=BETAS, states=states, **options)
    for step in range(steps):
        p.grad = gradient(shape, step).to(dtype)
        optimizer.step()
    return p, optimizer


def bytes_of(p, optimizer):
    parts = dict(optimizer.state_dict()["state"][0], p=p.detach())
    return {name: part.reshape(-1).view(torch.uint8).numpy().tobytes() for name, part in parts.items()}


def moments_of(optimizer, p):
    """Both as numpy float32 (rows, K), with the second as such."""
    state = optimizer.state[p]
    if "exp_avg_sq_root" in state:
        first, root = (breccia.dequantize(state[name]).numpy() for name in ("exp_avg", "exp_avg_sq_root"))
        return first, root * root
    return tuple(state[name].dequantize().numpy() for name in ("exp_avg", "exp_avg_sq"))


def padded(x, like):
    out = np.zeros(like.size, np.float32)
    out[: x.numel()] = x.detach().float().numpy().ravel()
    return out.reshape(like.shape)


def stepped(first, second, weights, g, step, lr=1e-2, decay=1e-2, eps=1e-8):
    """The step in float32, in the order of the kernel."""
    f = np.float32
    first = f(BETAS[0]) * first + f(1 - BETAS[0]) * g
    second = f(BETAS[1]) * second + f(1 - BETAS[1]) * g * g
    correction = f(1 / (1 - BETAS[1] ** step) ** 0.5)
    rate = f(lr / (1 - BETAS[0] ** step))
    limit = f(limit_of(step) * (1 - BETAS[0] ** step))
    change = np.clip(first / (np.sqrt(second) * correction + f(eps)), -limit, limit)
    return first, second, weights * f(1 - lr * decay) - rate * change


def limit_of(step):
    """The most that a step without decay is of its rate, of any gradients: Cauchy and Schwarz over their weights."""
    first = [(1 - BETAS[0]) * BETAS[0] ** i for i in range(step)]
    second = [(1 - BETAS[1]) * BETAS[1] ** i for i in range(step)]
    most = sum(a * a / b for a, b in zip(first, second, strict=True)) ** 0.5
    return most * sum(second) ** 0.5 / sum(first)


@pytest.mark.parametrize("states", EXPANDED)
def test_codes_are_those_of_the_powers(states):
    """In float64 from the definition, of a step whose moments before it are known."""
    p, optimizer = made(states)
    first, second = moments_of(optimizer, p)
    g, weights = gradient((70, 101), 9), padded(p, first)
    wanted = stepped(first, second, weights, padded(g, first), 4)
    p.grad = g
    optimizer.step()
    assert np.allclose(padded(p, first), wanted[2], rtol=1e-5, atol=1e-7)
    about = breccia.formats.finfo(EXPANDED[states])
    span = np.log2(about.max / about.smallest)
    for value, x in zip(("exp_avg", "exp_avg_sq"), wanted, strict=False):
        moment = optimizer.state[p][value]
        x = x.astype(np.float64).reshape(-1, 128)
        k = moment.exponents.numpy().astype(np.float64).reshape(-1, 1)
        size = np.abs(x)
        top = size.max(1, keepdims=True)
        least = np.where(size > 0, size, np.inf).min(1, keepdims=True)
        plain = top == 0
        with np.errstate(divide="ignore", invalid="ignore"):
            exponent = np.where(plain, 1, np.minimum(span / np.log2(top / least), 256))
            y = np.where(size > 0, about.max * (size / top) ** k, 0)
            slack = np.where(size > 0, y * k * 2e-6 * top / size, 0) + 2e-4 * y
        assert np.allclose(k, exponent, rtol=2e-3)
        scale = moment.scale.numpy().reshape(-1, 1)
        assert np.allclose(scale, np.where(plain, 1, top / about.max), rtol=1e-5)
        codes = moment.data.view(torch.uint8).numpy().reshape(-1, 128)
        found = breccia.formats.decode(codes, EXPANDED[states]).astype(np.float64)
        spacing = np.exp2(np.floor(np.log2(np.maximum(y, 2.0**-6))) - 3) if states == "fp8" else 1.0
        assert (np.abs(np.abs(found) - y) <= spacing * 0.505 + slack).all()
        signs = (found != 0) & (size > 1e-5 * top)
        assert (np.sign(found) == np.sign(x))[signs].all()


def test_mx_moments_are_those_of_casts():
    """Bit for bit: the first moment and the floored root of the second, by the draws of `breccia.cast`."""
    p, optimizer = made("mxfp8", shape=(64, 128))
    first, second = moments_of(optimizer, p)
    g, weights = gradient((64, 128), 9), padded(p, first)
    first, second, weights = stepped(first, second, weights, padded(g, first), 4)
    p.grad = g
    optimizer.step()
    assert np.array_equal(padded(p, first), weights)
    root = np.sqrt(second).reshape(-1, 32)
    root = np.where(root > 0, np.maximum(root, root.max(1, keepdims=True) * np.float32(2.0**-16)), root)
    for name, x, seed in (("exp_avg", first, 8), ("exp_avg_sq_root", root.reshape(first.shape), 9)):
        wanted = breccia.cast(torch.from_numpy(x), breccia.MXFP8BlockScaling(), rounding="stochastic", seed=seed)
        found = optimizer.state[p][name]
        for part in ("data", "scale"):
            assert torch.equal(*(getattr(each, part).view(torch.uint8) for each in (found, wanted))), (name, part)


@pytest.mark.parametrize("states", STATES)
def test_every_backend_and_any_number_of_threads_give_the_same_bytes(states):
    before, threads = breccia.cpu_info()["backend"], breccia.num_threads()
    try:
        for dtype in DTYPES:
            breccia.set_backend("portable")
            breccia.set_num_threads(1)
            wanted = bytes_of(*made(states, dtype, shape=(130, 101)))
            breccia.set_num_threads(3)
            assert bytes_of(*made(states, dtype, shape=(130, 101))) == wanted
            for backend in breccia.cpu_info()["supported"]:
                breccia.set_backend(backend)
                assert bytes_of(*made(states, dtype, shape=(130, 101))) == wanted, (backend, dtype)
    finally:
        breccia.set_backend(before)
        breccia.set_num_threads(threads)


@pytest.mark.parametrize("states", STATES)
def test_a_gradient_that_is_not_finite_touches_its_own_number_alone(states):
    """As of torch; nor does one whose square is beyond float32, which counts as zero, spoil those beside it."""
    p, optimizer = made(states, shape=(64, 128))
    q, peer = made(states, shape=(64, 128))
    for each, other, bad in ((p, optimizer, True), (q, peer, False)):
        each.grad = gradient((64, 128), 5)
        each.grad[20, 3] = each.grad[21, 4] = each.grad[22, 5] = 0
        if bad:
            each.grad[20, 3], each.grad[21, 4], each.grad[22, 5] = torch.inf, torch.nan, -3e38
        other.step()
    assert torch.isnan(p[20, 3]) and torch.isnan(p[21, 4])
    p.data[20, 3], p.data[21, 4] = q[20, 3], q[21, 4]
    assert torch.equal(p, q)
    for one, wanted in zip(moments_of(optimizer, p), moments_of(peer, q), strict=True):
        assert np.array_equal(one, wanted)


def test_options_of_torch_alone_are_refused_in_a_sentence():
    p = torch.nn.Parameter(torch.zeros(64, 128))
    AdamW([p], foreach=False, fused=None, capturable=False)
    for name in ("foreach", "fused", "capturable", "amsgrad", "maximize", "differentiable"):
        with pytest.raises(TypeError, match=f"^{name} must be left out, as torch's AdamW alone has it"):
            AdamW([p], **{name: True})
    with pytest.raises(TypeError, match=r"^momentum must be left out"):
        AdamW([p], momentum=0.9)


@pytest.mark.parametrize("states", STATES)
def test_parameters_that_fully_shard_gathers_as_codes_step(states):
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for shardable in (False, True):
            torch.manual_seed(0)
            model = torch.nn.Sequential(breccia.nn.ScaledLinear(128, 128))
            if shardable:
                breccia.distributed.make_shardable_(model)
                fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
            optimizer = AdamW(model.parameters(), lr=1e-2, states=states)
            for seed in range(3):
                optimizer.zero_grad()
                model(torch.randn(8, 128, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
                optimizer.step()
            found.append([getattr(p, "to_local", lambda p=p: p)() for p in model.parameters()])
        for plain, shard in zip(*found, strict=True):
            assert torch.equal(plain, torch.empty(shard.shape).copy_(shard.detach()))
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("states", STATES)
def test_weights_that_are_not_contiguous_have_the_step_of_those_that_are(states):
    p, optimizer = made(states, steps=0)
    turned = torch.nn.Parameter(p.detach().T.contiguous().T)
    other = AdamW([turned], lr=1e-2, betas=BETAS, states=states)
    assert not turned.is_contiguous()
    for step in range(2):
        p.grad = gradient(p.shape, step)
        turned.grad = p.grad.T.contiguous().T
        optimizer.step()
        other.step()
    assert torch.equal(p, turned) and not turned.is_contiguous()
    assert torch.equal(*(o.state_dict()["state"][0]["exp_avg"].view(torch.uint8) for o in (optimizer, other)))


def test_states_stay_where_they_are():
    """A step writes in place: no memory but that of one run of numbers."""
    p, optimizer = made("fp8", steps=1)
    before = [part.data_ptr() for name, part in optimizer.state_dict()["state"][0].items() if name != "step"]
    p.grad = gradient(p.shape, 1)
    optimizer.step()
    after = [part.data_ptr() for name, part in optimizer.state_dict()["state"][0].items() if name != "step"]
    assert before == after


def test_what_the_core_refuses():
    w, g = torch.zeros(256), torch.zeros(256)
    codes, scale, exponents = torch.zeros(256, dtype=torch.uint8), torch.ones(2), torch.ones(2, dtype=torch.float16)
    recipe = breccia.Float8ExpandedScaling()

    def step(w=w, g=g, first=None, recipe=recipe, count=1):
        second = [codes.clone(), scale.clone(), exponents.clone()]
        parts = [[core_array(x, "moment") for x in moment] for moment in (first or [codes, scale, exponents], second)]
        moments = [(*arrays, *[None] * (3 - len(arrays))) for arrays in parts]
        _core.adamw_step(
            core_array(w, "w"), core_array(g, "g"), *moments, _spec(recipe), 1e-3, 0.9, 0.999, 1e-8, 0, count
        )

    step()
    for message, given in (
        (r"gradients must be of the weights' shape \(256,\), got \(255,\)", {"g": g[:255]}),
        (r"weights must be C-contiguous", {"w": torch.zeros(512)[::2]}),
        (r"step must be at least 1, got 0", {"count": 0}),
        (r"recipe must have groups of 16 to 256 along rows of E4M3", {"recipe": breccia.MXFP8BlockScaling()}),
        (r"both moments must have exponents, or neither", {"first": [codes, scale]}),
        (r"first.codes must be C-contiguous memory .* 256 of uint8; got uint8 of shape \(128,\)",
         {"first": [codes[:128].clone(), scale, exponents]}),
        (r"first.exponents must be .* 2 of float16; got float32", {"first": [codes, scale, scale.clone()]}),
        (r"must not overlap", {"g": w}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            step(**given)


def test_devices_without_a_kernel_are_refused():
    p = torch.nn.Parameter(torch.zeros(64, 128, device="meta"))
    p.grad = torch.zeros_like(p)
    with pytest.raises(TypeError, match=r"states as codes need a CPU or a CUDA device with Triton, got .* on meta"):
        AdamW([p]).step()


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("each", [True, False], ids=["each its own", "any"])
def test_no_step_is_larger_than_any_of_floats(states, each):
    """Gradients that span 10^6 in a group: INT8's codes of its small ones moved weights by 12.8 times the rate."""
    draw = torch.Generator().manual_seed(3)
    size = 10.0 ** (-6 * torch.rand(64, 256, generator=draw))
    p = torch.nn.Parameter(torch.zeros(64, 256))
    optimizer = AdamW([p], lr=1.0, betas=BETAS, states=states, weight_decay=0)
    for step in range(1, 61):
        before = p.detach().clone()
        p.grad = torch.randn(64, 256, generator=draw)
        p.grad *= size if each else 10.0 ** (-6 * torch.rand(64, 256, generator=draw))
        optimizer.step()
        assert float((p.detach() - before).abs().max()) <= limit_of(step) * (1 + 1e-5), step
    assert limit_of(step) < 1.76


@pytest.mark.parametrize("betas", [(0.9, 0.5), (0.0, 0.999), (0.9, 0.0), (0.0, 0.0)], ids=str)
def test_betas_without_a_limit_step_as_torch(betas):
    """Where betas[0]² is not below betas[1] torch's steps have no limit, or none that is finite after many steps."""
    p, q = (torch.nn.Parameter(torch.ones(64, 128)) for _ in range(2))
    ours, theirs = AdamW([p], betas=betas, states="fp8"), torch.optim.AdamW([q], betas=betas)
    for step in range(3):
        p.grad = q.grad = torch.full((64, 128), 0.5 + step)
        ours.step()
        theirs.step()
    assert torch.allclose(p, q, rtol=1e-4)
