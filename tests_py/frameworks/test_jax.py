# SPDX-License-Identifier: Apache-2.0
"""JAX: memory, dtypes, transformations, and the implementation for devices other than a CPU."""

import subprocess
import sys

import breccia
import cases
import numpy as np
import peers
import pytest
from breccia import autograd, cast, dequantize, linear, matmul, requantize
from breccia.autograd import cast_ste

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from breccia.frameworks import jax as framework  # noqa: E402
from breccia.frameworks.jax import callbacks, ffi  # noqa: E402
from breccia.kernels import whole_array  # noqa: E402
from breccia.verbs.cast_options import CastOptions  # noqa: E402

PEER = peers.Jax()
MXFP8, NVFP4, INT4 = breccia.MXFP8BlockScaling(), breccia.NVFP4BlockScaling(), breccia.INT4Scaling()


def special():
    x = cases.heavy_tailed("student", (6, 256))
    x[1, 3], x[2, 7], x[3, 9] = np.nan, np.inf, -np.nan
    x[4] *= np.float32(1e-38)
    return x


@pytest.fixture(params=["callback", "ffi"])
def compiled(request, monkeypatch):
    """Both ways of compiled code to the core."""
    if request.param == "ffi" and not ffi.register():
        pytest.skip("built without jaxlib's headers")
    monkeypatch.setattr(ffi, "method", request.param)
    jax.clear_caches()
    yield
    jax.clear_caches()


@cases.ALL
@pytest.mark.usefixtures("compiled")
@pytest.mark.in_turn
def test_under_jit(recipe):
    x = special()
    reference = cast(x, recipe)
    scaled = jax.jit(lambda x: cast(x, recipe))(x)
    peers.same_parts(PEER, scaled, reference, "cast")
    assert scaled.shape == reference.shape
    peers.same_bytes(PEER, jax.jit(dequantize)(scaled), dequantize(reference), "dequantize")
    again = jax.jit(lambda s: requantize(s, MXFP8))(scaled)
    peers.same_parts(PEER, again, requantize(reference, MXFP8), "requantize")
    w = cast(jnp.asarray(cases.normal((7, 256), seed=1)), recipe)
    y = cases.normal((5, 256))
    np.testing.assert_array_equal(np.asarray(jax.jit(linear)(y, w)), np.asarray(linear(jnp.asarray(y), w)))


@cases.ALL
@pytest.mark.usefixtures("compiled")
def test_arrays_that_compiled_code_closes_over(recipe):
    """Concrete where the function is traced, constants of what it becomes; jit, scan and grad alike."""
    x, g = jnp.asarray(cases.normal((6, 256))), jnp.asarray(cases.normal((6, 256), seed=1))
    w = cast(jnp.asarray(cases.normal((7, 256), seed=2)), recipe)

    def verbs():
        made = cast(x, recipe), cast(x, recipe, rounding="stochastic", seed=3), requantize(w, MXFP8)
        return *made, dequantize(w), linear(x, w), matmul(x, w.T), w.view().scale, w.to("numpy").to("jax").data

    for one, part in zip(jax.tree.leaves(jax.jit(verbs)()), jax.tree.leaves(verbs()), strict=True):
        peers.same_bytes(PEER, one, np.asarray(part), "closed over")
    _, scanned = jax.lax.scan(lambda i, _: (i, dequantize(cast(x, recipe))), 0, None, 1)
    peers.same_bytes(PEER, scanned[0], np.asarray(dequantize(cast(x, recipe))), "closed over in scan")
    master = jnp.asarray(cases.normal((7, 256), seed=4))

    def loss(master):
        return (
            (cast_ste(x, recipe) @ master.T) * linear(g, cast_ste(master, recipe)) * autograd.linear(x, master)
        ).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(loss))(master), jax.grad(loss)(master), rtol=1e-4, atol=1e-2)


@cases.ALL
def test_integer_gradients_are_there_where_jax_is_asked_for_them(recipe):
    x, w = jnp.asarray(cases.normal((6, 256))), cast(jnp.asarray(cases.normal((7, 256), seed=2)), recipe)
    uses = (lambda w: linear(x, w), dequantize, lambda w: dequantize(requantize(w, MXFP8)), lambda w: dequantize(w.mT))
    for use in uses:
        found = jax.grad(lambda w, use=use: use(w).sum(), allow_int=True)(w)
        assert jax.tree.structure(found) == jax.tree.structure(w)
    # Beside codes an adapter is trained.
    both = jax.grad(lambda p: (linear(x, p["w"]) + p["bias"]).sum(), allow_int=True)({"w": w, "bias": jnp.ones(7)})
    np.testing.assert_array_equal(both["bias"], np.full(7, 6.0))


@cases.ALL
def test_grouped_products_of_traced_offsets(recipe):
    x, w = jnp.asarray(cases.normal((9, 256))), cast(jnp.asarray(cases.normal((3, 64, 256), seed=2)), recipe)
    offsets = jnp.asarray([0, 2, 2, 7])
    grouped = jax.jit(breccia.grouped_matmul)
    for rows in (x, cast(x, MXFP8)):
        expected = breccia.grouped_matmul(rows, w, offsets)
        np.testing.assert_allclose(grouped(rows, w, offsets), expected, rtol=2e-5, atol=2e-4)
    gradient = jax.jit(jax.grad(lambda x: (breccia.grouped_matmul(x, w, offsets) ** 2).sum()))
    traced = jax.jit(jax.grad(lambda x, offsets: (breccia.grouped_matmul(x, w, offsets) ** 2).sum()))
    np.testing.assert_allclose(traced(x, offsets), gradient(x), rtol=1e-4, atol=1e-2)


@cases.ALL
def test_tensors_are_joined_under_jit_or_a_sentence_says_why_not(recipe):
    a, b = (cast(jnp.asarray(cases.normal((128, 256), seed=seed)), recipe) for seed in (2, 3))
    one = recipe.layout.one_scale
    shares = {"stack": one, 0: one or a.global_scale is not None}
    shares[1] = shares[0] or recipe.layout.block.columns == 0
    for way, refused in shares.items():

        def join(a, b, way=way):
            return breccia.stack([a, b]) if way == "stack" else breccia.concatenate([a, b], axis=way)

        if refused:
            with pytest.raises(ValueError, match="tensors must not be traced to be joined along axis"):
                jax.jit(join)(a, b)
        else:
            peers.same_bytes(PEER, dequantize(jax.jit(join)(a, b)), np.asarray(dequantize(join(a, b))), way)


@cases.ALL
def test_forward_differentiation_is_refused_in_a_sentence(recipe):
    x, w = jnp.asarray(cases.normal((6, 256))), cast(jnp.asarray(cases.normal((7, 256), seed=2)), recipe)
    values = dequantize(w)
    products = (lambda x: linear(x, w), lambda x: autograd.linear(x, values))
    calls = [
        *(lambda call=call: jax.jvp(call, (x,), (x,)) for call in (*products, lambda x: cast_ste(x, recipe))),
        *(lambda call=call: jax.jacfwd(call)(x) for call in products),
        lambda: jax.hessian(lambda x: (linear(x, w) ** 2).sum())(x),
    ]
    for call in calls:
        with pytest.raises(
            TypeError, match=r"must be differentiated in reverse mode \(grad, vjp, jacrev\), not forward"
        ):
            call()


def test_a_first_call_inside_of_jit_knows_what_is_traced():
    code = "import jax, jax.numpy as jnp; x = jnp.ones((2, 32)); import breccia; "
    code += "f = jax.jit(lambda: breccia.cast(x, 'mxfp8').dequantize()); assert (f() == x).all(); "
    code += "assert breccia.frameworks.jax.callbacks.is_staging() is False"
    subprocess.run([sys.executable, "-c", code], check=True)


@cases.ALL
def test_the_implementation_for_other_devices_makes_the_same_bytes(recipe):
    for x in (cases.heavy_tailed("student", (6, 256)), cases.heavy_tailed("ties", (6, 256))):
        reference = cast(x, recipe)

        @jax.jit
        def by_jnp(x):
            parts = whole_array.cast(framework.namespace, x, recipe, CastOptions())
            return callbacks.tensor_of(framework.as_outputs(parts, recipe), recipe, x.shape, "float32", x)

        mine = by_jnp(x)
        peers.same_parts(PEER, mine, reference, "cast")
        values = jax.jit(lambda s: whole_array.dequantize(framework.namespace, s, callbacks.raw))(mine)
        # XLA flushes subnormal results to zero on a CPU.
        expected = dequantize(reference)
        expected = np.where(np.abs(expected) < np.finfo(np.float32).tiny, 0, expected)
        np.testing.assert_array_equal(np.broadcast_to(values, expected.shape), expected)


def test_native_dtypes():
    x = jnp.asarray(cases.normal((4, 256)))
    assert cast(x, MXFP8).data.dtype == jnp.float8_e4m3fn
    assert cast(x, MXFP8).scale.dtype == jnp.float8_e8m0fnu
    assert cast(x, NVFP4).data.dtype == jnp.uint8
    assert cast(x, NVFP4).scale.dtype == jnp.float8_e4m3fn
    assert cast(x, breccia.Float8BlockScaling(scale_format="bf16")).scale.dtype == jnp.bfloat16
    assert jax.jit(lambda x: cast(x, MXFP8))(x).data.dtype == jnp.float8_e4m3fn


def test_the_core_reads_and_writes_jax_memory():
    x = jnp.asarray(cases.normal((64, 256)))
    assert framework.to_core(x, "x").ctypes.data == x.unsafe_buffer_pointer()
    for made in (dequantize(cast(np.asarray(x), INT4)), cast(np.asarray(x), MXFP8).data):
        assert framework.from_numpy(made).unsafe_buffer_pointer() == made.ctypes.data
    made = callbacks.empty((64, 256), np.float32)
    assert framework.from_numpy(made).unsafe_buffer_pointer() == made.ctypes.data


@pytest.mark.usefixtures("compiled")
def test_vmap_is_a_loop():
    x = cases.normal((3, 4, 256))
    for recipe in (MXFP8, NVFP4, INT4, breccia.Float8CurrentScaling()):
        mapped = jax.vmap(lambda x: cast(x, recipe))(x)
        for i in range(3):
            one = jax.tree_util.tree_map(lambda leaf: leaf[i], mapped)
            peers.same_parts(PEER, one, cast(x[i], recipe))
        values = jax.vmap(dequantize)(mapped)
        np.testing.assert_array_equal(values, np.stack([dequantize(cast(x[i], recipe)) for i in range(3)]))
        products = jax.vmap(lambda y, w: matmul(y, w.T))(jnp.asarray(x), mapped)
        assert products.shape == (3, 4, 4)


@pytest.mark.usefixtures("compiled")
def test_grad_through_matmul_and_cast():
    w = cast(jnp.asarray(cases.normal((7, 256), seed=1)), MXFP8)
    values = np.asarray(dequantize(w))
    for shape in [(5, 256), (2, 3, 256)]:
        x = jnp.asarray(cases.normal(shape))
        grad = jax.jit(jax.grad(lambda x: (linear(x, w) ** 2).sum()))(x)
        expected = 2 * (np.asarray(x) @ values.T) @ values
        np.testing.assert_allclose(grad, expected, rtol=2e-4, atol=2e-3)
    # The codes of a cast are constants to differentiation.
    zero = jax.grad(lambda x: dequantize(cast(x, MXFP8)).sum())(jnp.ones((2, 32)))
    np.testing.assert_array_equal(zero, 0)


def test_a_scaled_tensor_is_a_tree():
    scaled = cast(jnp.asarray(cases.normal((4, 256))), NVFP4)
    leaves, tree = jax.tree_util.tree_flatten(scaled)
    assert len(leaves) == 3
    assert jax.tree_util.tree_unflatten(tree, [None] * 3).recipe == NVFP4
    assert jax.eval_shape(lambda x: cast(x, NVFP4), jax.ShapeDtypeStruct((4, 256), jnp.float32)).shape == (4, 256)
    doubled = jax.jit(lambda s: s)(scaled)
    peers.same_parts(PEER, doubled, cast(cases.normal((4, 256)), NVFP4))
    assert jax.tree_util.tree_structure(doubled) == tree


@pytest.mark.usefixtures("compiled")
def test_large_arrays_under_jit_do_not_wait_for_themselves():
    x = jnp.asarray(cases.normal((1024, 2048)))

    @jax.jit
    def chain(x):
        for _ in range(3):
            x = dequantize(cast(x * 1.5, MXFP8))
        return x

    assert np.isfinite(np.asarray(chain(x))).all()


@pytest.mark.usefixtures("compiled")
def test_traced_seeds():
    x = jnp.asarray(cases.normal((4, 256)))

    @jax.jit
    def draw(x, seed):
        return cast(x, NVFP4, rounding="stochastic", seed=seed)

    for seed in (3, -4):
        reference = cast(np.asarray(x), NVFP4, rounding="stochastic", seed=seed)
        peers.same_parts(PEER, draw(x, seed), reference)
    options = {"rounding": "stochastic", "seed": 2**40 + 1, "hadamard": breccia.Hadamard(16, 3), "square_blocks": True}
    constant = jax.jit(lambda x: cast(x, NVFP4, **options))
    peers.same_parts(PEER, constant(x), cast(np.asarray(x), NVFP4, **options))
    mapped = jax.vmap(lambda x: cast(x, MXFP8, rounding="stochastic", seed=5))(jnp.stack([x, 2 * x]))
    for i, member in enumerate((x, 2 * x)):
        one = jax.tree_util.tree_map(lambda leaf: leaf[i], mapped)
        peers.same_parts(PEER, one, cast(np.asarray(member), MXFP8, rounding="stochastic", seed=5))


def test_compiled_code_does_not_pass_through_python():
    if not ffi.register():
        pytest.skip("built without jaxlib's headers")
    text = jax.jit(lambda x: dequantize(cast(x, NVFP4))).lower(jnp.ones((2, 32))).as_text()
    assert "breccia_cast" in text
    assert "callback" not in text
    with pytest.raises(ValueError, match="BRECCIA_XLA must be"):
        ffi.chosen("fast")


LATE_REGISTRATION = """
import jax
from jax._src import xla_bridge

started = []

def refuse(*arguments, **options):
    started.append(bool(xla_bridge._backends))
    raise ValueError("the handler is newer than jaxlib")

jax.ffi.register_ffi_target = refuse
import breccia

breccia.frameworks.jax
assert not started and not xla_bridge._backends, "an import must start nothing"
x = jax.numpy.ones((4, 32))
made = jax.jit(lambda x: breccia.cast(x, "mxfp8").dequantize())(x)
assert (made == x).all() and started in ([True], []), started
"""


def test_handlers_that_jaxlib_refuses_are_done_without():
    """XLA told of them before its backend runs would not start at all."""
    subprocess.run([sys.executable, "-c", LATE_REGISTRATION], check=True)


def test_clear_errors():
    x = jnp.asarray(cases.normal((4, 256)))
    with pytest.raises(TypeError, match="out must be None"):
        dequantize(cast(x, MXFP8), out=x)
    with pytest.raises(TypeError, match="float64"):
        dequantize(cast(x, MXFP8), "float64")
    with pytest.raises(TypeError, match="traced"):
        jax.jit(lambda x: cast(x, MXFP8).to("numpy").scale)(x)
    with pytest.raises(ValueError, match="divisible by 32"):
        jax.jit(lambda x: cast(x, MXFP8))(x[:, :100])
    with pytest.raises(ValueError, match="target must be"):
        cast(x, MXFP8).to("nowhere")
