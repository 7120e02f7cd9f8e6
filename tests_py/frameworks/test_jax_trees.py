# SPDX-License-Identifier: Apache-2.0
"""ScaledTensors as nodes of trees that JAX's libraries take apart, put together, save and load."""

import io
import subprocess
import sys

import breccia
import cases
import numpy as np
import peers
import pytest
from breccia import cast

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

PEER = peers.Jax()
X = cases.normal((256, 256))


def tree_of(recipe):
    return {"w": cast(jnp.asarray(X), recipe), "bias": jnp.ones(256)}


def same(made, tree):
    peers.same_parts(PEER, made["w"], tree["w"].to("numpy"))
    assert made["w"] == tree["w"]
    assert (made["bias"] == tree["bias"]).all()


@cases.ALL
def test_a_tree_says_the_same_of_leaves_of_every_kind(recipe):
    tree = tree_of(recipe)
    structure = jax.tree.structure(tree)
    described = jax.eval_shape(lambda: tree)
    assert jax.tree.structure(described) == structure
    names = jax.tree.map(lambda leaf: leaf.dtype.name, tree)
    assert jax.tree.structure(names) == structure
    marked = jax.tree.map(lambda leaf: "leaf", tree, is_leaf=lambda leaf: leaf is None)
    same(jax.tree.map(lambda leaf, _: leaf, tree, marked, is_leaf=lambda leaf: leaf is None), tree)
    floats = jax.tree.map(lambda leaf: leaf if leaf.dtype == jnp.float32 else None, tree)
    others = jax.tree.map(lambda leaf: None if leaf.dtype == jnp.float32 else leaf, tree)
    joined = jax.tree.map(lambda a, b: b if a is None else a, floats, others, is_leaf=lambda leaf: leaf is None)
    same(joined, tree)


@cases.ALL
def test_optax_trains_what_lies_beside_a_scaled_tensor(recipe):
    optax = pytest.importorskip("optax")
    tree = tree_of(recipe)
    labels = {"w": jax.tree.map(lambda _: "fixed", tree["w"]), "bias": "trained"}
    for label in (labels, {"w": "fixed", "bias": "trained"}):
        ways = {"fixed": optax.set_to_zero(), "trained": optax.sgd(0.5)}
        optimizer = optax.multi_transform(ways, label)
        updates, _ = optimizer.update(jax.tree.map(jnp.ones_like, tree), optimizer.init(tree), tree)
        assert jax.tree.structure(updates) == jax.tree.structure(tree)
        assert (optax.apply_updates(tree, updates)["bias"] == 0.5).all()
        assert not updates["w"].data.astype(jnp.float32).any()


@cases.ALL
@pytest.mark.parametrize("name", ["StandardCheckpointer", "PyTreeCheckpointer"])
def test_orbax_saves_and_restores(recipe, name, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    if recipe.element == "float8_e4m3":
        pytest.skip("tensorstore has no such dtype")
    tree = tree_of(recipe)
    wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
    with getattr(ocp, name)() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", tree)
        if name == "StandardCheckpointer":
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "checkpoint", wanted)
        else:
            arguments = ocp.checkpoint_utils.construct_restore_args(tree)
            restored = checkpointer.restore(tmp_path / "checkpoint", item=wanted, restore_args=arguments)
    same(restored, tree)


@cases.ALL
def test_flax_saves_and_restores(recipe):
    serialization = pytest.importorskip("flax.serialization")
    tree = tree_of(recipe)
    stored = serialization.to_bytes(tree)
    same(serialization.from_bytes(jax.tree.map(jnp.zeros_like, tree), stored), tree)
    host = {**tree, "w": tree["w"].to("numpy")}
    assert serialization.from_bytes(host, serialization.to_bytes(host))["w"] == host["w"]
    state = serialization.to_state_dict(tree)
    with pytest.raises(ValueError, match="state must have data, scale"):
        serialization.from_state_dict(tree, {**state, "w": {"data": state["w"]["data"]}})


@pytest.mark.parametrize("order", ["jax flax.serialization breccia", "jax breccia flax.serialization"])
def test_flax_may_be_imported_before_or_after(order):
    pytest.importorskip("flax.serialization")
    code = "; ".join(f"import {name}" for name in order.split())
    code += "; w = breccia.cast(jax.numpy.ones((2, 32)), 'mxfp8'); "
    code += "s = flax.serialization; assert s.from_bytes(w, s.to_bytes(w)) == w"
    subprocess.run([sys.executable, "-c", code], check=True)


@cases.ALL
def test_equinox_parts_joins_and_saves(recipe):
    eqx = pytest.importorskip("equinox")
    tree = tree_of(recipe)
    same(eqx.combine(*eqx.partition(tree, lambda leaf: leaf.dtype == jnp.float32)), tree)

    def save(file, leaf):  # NumPy's files have no dtypes of 8 bits (docs/frameworks.md)
        np.save(file, np.asarray(leaf).view(f"u{leaf.dtype.itemsize}"))

    def load(file, leaf):
        return jnp.asarray(np.load(file).view(leaf.dtype))

    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, tree, filter_spec=save)
    file.seek(0)
    same(eqx.tree_deserialise_leaves(file, jax.tree.map(jnp.zeros_like, tree), filter_spec=load), tree)


def test_a_compiled_function_takes_each_kind_of_weight():
    w = cast(jnp.asarray(X), breccia.MXFP6BlockScaling())
    for one in (w, breccia.prepare(w)):
        assert jax.jit(lambda w: w)(one) == w
