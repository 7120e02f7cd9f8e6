# SPDX-License-Identifier: Apache-2.0
"""Arrays over four devices of one process, which XLA makes of a CPU: run by test_jax_sharding.py in processes of their
own.

Each function is one test; names, with commas between, are the argument. Compiling takes most of the time: unless
a second argument is "whole", a recipe is tried with some of the ways to cut arrays, each recipe with others, and of all
recipes a part takes its turn, as cases do that are alike (tests_py/conftest.py). What is compiled is optimized as a
user's program is: bytes are compared of it, which optimization could change.
"""

import itertools
import os
import re
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
sys.path.insert(0, str(Path(__file__).parent.parent))

import breccia
import cases
import jax
import jax.numpy as jnp
import numpy as np
from breccia import autograd, sharding
from breccia.frameworks.jax import sharding as cuts
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

SPECS = (P("d"), P(None, "d"), P(("a", "d")), P("a", "d"), P("d", "a"))
PARTS = ("data", "scale", "zero_point", "global_scale")
FEW = ("current", "current-row", "block-128x128", "mxfp8", "nvfp4", "mxfp4-mse", "int4-asymmetric", "int8")

WHOLE = sys.argv[2:] == ["whole"]


def some(ways, turn, number=1):
    """So many of the ways, those whose turn it is; all of them where the whole is tested."""
    ways = list(ways)
    return ways if WHOLE else [ways[(turn * number + i) % len(ways)] for i in range(min(number, len(ways)))]


def recipes_in_turn():
    """Every recipe whose turn it is, after its number among all."""
    of, turn = (int(os.environ.get(f"BRECCIA_TESTS_{name}") or 0) for name in ("ONE_OF", "TURN"))
    touched = "/test_jax_sharding.py" in Path(os.environ.get("BRECCIA_TESTS_TOUCHED") or os.devnull).read_text()
    for number, (name, recipe) in enumerate(cases.RECIPES.items()):
        if WHOLE or of < 2 or touched or number % of == turn % of:
            yield number, name, recipe


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((2, 2), ("a", "d"), axis_types=(kind, kind))


def values(shape=(512, 1024), seed=0):
    x = cases.normal(shape, seed=seed)
    x[3, 5], x[7, -9] = 1e-41, 40.0
    return x


def same(made, reference, what):
    for name in PARTS:
        got, wanted = getattr(made, name), getattr(reference, name)
        assert (got is None) == (wanted is None), (what, name)
        if got is not None:
            got, wanted = np.asarray(got), np.asarray(wanted)
            assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes(), (what, name)


def moved(compiled):
    """(operation, dtype, elements) of what travels between devices."""
    pattern = r"= (\w+)\[([\d,]*)\]\S* (all-gather|all-reduce|all-to-all|collective-permute)"
    found = re.findall(pattern, compiled.as_text())
    return [(kind, dtype, int(np.prod([int(n) for n in shape.split(",") if n]))) for dtype, shape, kind in found]


def legal(shape, spec, tensor):
    """Whether the cut goes between blocks."""
    try:
        sharding.shardings(tensor, NamedSharding(mesh(), spec))
    except ValueError:
        return False
    return True


def casts_stay_where_they_are():
    x = values()
    for turn, name, recipe in recipes_in_turn():
        reference = breccia.cast(jnp.asarray(x), recipe)
        for spec in some(SPECS if name in FEW else SPECS[:2], turn):
            placed = jax.device_put(x, NamedSharding(mesh(), spec))
            compiled = jax.jit(lambda x, recipe=recipe: breccia.cast(x, recipe)).lower(placed).compile()
            made = compiled(placed)
            same(made, reference, (name, spec))
            travels = moved(compiled)
            if legal(x.shape, spec, reference) and recipe_is_split(recipe):
                wanted = sharding.shardings(reference, NamedSharding(mesh(), spec))
                for part in PARTS:
                    if getattr(made, part) is not None:
                        assert getattr(made, part).sharding.is_equivalent_to(
                            getattr(wanted, part), getattr(made, part).ndim
                        ), (name, spec, part, getattr(made, part).sharding)
                assert all(kind == "all-reduce" and n <= x.shape[0] for kind, _, n in travels), (name, spec, travels)


def recipe_is_split(recipe):
    """A search for one scale, or one zero point, of what several devices hold is done on the whole."""
    searched = getattr(recipe, "scale_search", "amax") != "amax" or not getattr(recipe, "symmetric", True)
    one_scale = recipe.layout.name in ("per_tensor", "per_channel")
    return not (searched and one_scale)


def casts_at_once():
    x = values()
    for name in FEW:
        recipe = cases.RECIPES[name]
        placed = jax.device_put(x, NamedSharding(mesh(), P("d")))
        made = breccia.cast(placed, recipe)
        reference = breccia.cast(jnp.asarray(x), recipe)
        same(made, reference, name)
        assert len(made.data.sharding.device_set) == 4 and not made.data.sharding.is_fully_replicated, name
        back = breccia.dequantize(made)
        assert back.sharding.is_equivalent_to(placed.sharding, 2), name
        assert np.asarray(back).tobytes() == np.asarray(breccia.dequantize(reference)).tobytes(), name


def subnormal_numbers_are_kept():
    """As on one device, although XLA flushes them in code of its own."""
    for turn, name, recipe in recipes_in_turn():
        rows, columns = (4 * n for n in cuts.blocks_of(recipe.layout, packed=True, ndim=2))
        x = cases.normal((max(rows, 16), max(columns, 64)))
        for scale in some((1e-39, 1e-37), turn):
            small = x * np.float32(scale)
            reference = breccia.cast(jnp.asarray(small), recipe)
            for spec in some((P("d"), P(None, "d")), turn):
                made = breccia.cast(jax.device_put(small, NamedSharding(mesh(), spec)), recipe)
                same(made, reference, (name, spec, scale))
                back, wanted = (np.asarray(breccia.dequantize(one)) for one in (made, reference))
                assert back.tobytes() == wanted.tobytes(), (name, spec, scale)


def more_devices_than_blocks():
    """Values are split into more parts than there are blocks, so scales can be split over a part of a mesh's axis."""
    line = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    for turn, name, recipe in recipes_in_turn():
        rows, columns = (2 * n for n in cuts.blocks_of(recipe.layout, packed=True, ndim=2))
        x = cases.normal((max(rows, 4), max(columns, 4)))
        reference = breccia.cast(jnp.asarray(x), recipe)
        back = np.asarray(breccia.dequantize(reference))
        for spec in some((P(None, "d"), P("d")), turn):
            placed = jax.device_put(x, NamedSharding(line, spec))
            same(breccia.cast(placed, recipe), reference, (name, spec))
            values = jax.jit(lambda x, recipe=recipe: breccia.dequantize(breccia.cast(x, recipe)))(placed)
            assert np.asarray(values).tobytes() == back.tobytes(), (name, spec)


def of_bytes(x):
    """An array's dtype, shape and bytes, to compare."""
    x = np.asarray(x)
    return x.dtype, x.shape, x.tobytes()


def close(made, reference, what):
    """Of products: few rows may take another kernel than many."""
    np.testing.assert_allclose(np.asarray(made), np.asarray(reference), rtol=1e-5, atol=1e-4, err_msg=str(what))


def results_lie_where_operands_do():
    x, last = cases.normal((32, 64)), jax.devices()[-1]
    there, free = jax.device_put(x, last), jnp.asarray(x)
    for array, bound in ((there, True), (free, False)):
        q = breccia.cast(array, "mxfp8")
        made = [q, breccia.requantize(q, "nvfp4"), breccia.dequantize(q), breccia.matmul(array, q.mT)]
        made += [breccia.linear(array, q), breccia.cast_ste(array, "mxfp8"), q.view(), breccia.transpose(q).value]
        for one in jax.tree.leaves(made[:-1] + [made[-1]] * bound):
            assert one.devices() == array.devices() and one.committed == bound, (one.devices(), one.committed)
    sharded = jax.device_put(x, NamedSharding(mesh(), P("d")))
    for a, b in ((free, sharded), (sharded, free)):  # jax moves what lies nowhere in particular
        w = breccia.cast(b, "mxfp8")
        for product in (breccia.linear, jax.jit(breccia.linear)):
            close(product(a, w), breccia.linear(free, breccia.cast(free, "mxfp8")), "moved")
    try:
        breccia.linear(there, breccia.cast(sharded, "mxfp8"))
    except TypeError as error:
        assert "must be on one device, got (CpuDevice(id=3),) and (CpuDevice(id=0), CpuDevice(id=1)," in str(error)
    else:
        raise AssertionError


def other_verbs_gather():
    x, w = cases.normal((32, 128)), cases.normal((4, 64, 128), seed=3)
    ends, importance = np.array([0, 3, 3, 20, 24]), np.linspace(0.5, 2, 128, dtype=np.float32)
    verbs = {
        "grouped": lambda x, q: breccia.grouped_matmul(x, q, ends),
        "transpose": lambda x, q: breccia.transpose(breccia.cast(x, "mxfp8")).value,
        "numpy": lambda x, q: q.to("numpy").to("jax"),
        "importance": lambda x, q: breccia.cast(x, "nvfp4", importance=importance),
        "amax": lambda x, q: breccia.cast(x, "nvfp4", amax=jnp.max(jnp.abs(x))),
        "offset": lambda x, q: breccia.cast(x, "mxfp8", rounding="stochastic", seed=3, offset=jnp.int32(128)),
    }
    q = breccia.cast(jnp.asarray(w), "mxfp8")
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh(kind)):
            for turn, (name, verb) in enumerate(verbs.items()):
                reference = verb(jnp.asarray(x), q)
                for spec, w_spec in some(((P("d", "a"), P("a")), (P("a"), P(None, "d")), (P(), P("d", "a"))), turn, 2):
                    placed = jax.device_put(x, NamedSharding(mesh(kind), spec))
                    weights = breccia.cast(jax.device_put(w, NamedSharding(mesh(kind), w_spec)), "mxfp8")
                    at_once = name in ("transpose", "numpy", "importance")
                    for call in (verb,) if at_once else (verb, jax.jit(verb)):
                        made = call(placed, weights)
                        if name == "grouped":
                            close(made, reference, (name, kind, spec))
                        else:
                            same(made, reference, (name, kind, spec))
    try:
        breccia.prepare(weights)
    except ValueError as error:
        assert "w must be in the memory of one CPU" in str(error)
    else:
        raise AssertionError


def gradients_of_explicit_axes():
    explicit = mesh(AxisType.Explicit)
    x = cases.normal((32, 256), seed=2)
    with jax.set_mesh(explicit):
        for turn, name, recipe in recipes_in_turn():
            q = breccia.cast(jnp.asarray(x), recipe)
            losses = [
                lambda x, q, f=f, r=recipe: jnp.sum(f(x, r) ** 2) for f in (breccia.cast_ste, breccia.cast_ste_clipped)
            ]
            losses.append(lambda x, q: jnp.sum(breccia.linear(x, q) ** 2))
            for loss, spec in zip(losses, some(SPECS, turn, 3), strict=False):
                placed, weight = jax.device_put(x, spec), q.map(lambda part: jax.device_put(part, P()))
                made = jax.jit(jax.grad(loss))(placed, weight)
                assert made.sharding.is_equivalent_to(placed.sharding, 2), (name, spec, made.sharding)
                reference = jax.grad(loss)(jnp.asarray(x), q)
                np.testing.assert_allclose(np.asarray(made), np.asarray(reference), rtol=1e-4, atol=1e-3, err_msg=name)
        recipes = autograd.LinearRecipes.fp8()
        for spec in some(SPECS, 0, 2):
            placed = jax.device_put(x, spec)
            made = jax.grad(lambda x, w: jnp.sum(autograd.linear(x, w, recipes=recipes)), (0, 1))(placed, placed)
            assert all(one.sharding.is_equivalent_to(placed.sharding, 2) for one in made), spec


def batches():
    """Explicit axes may split what vmap goes over."""
    x = cases.normal((4, 32, 256))
    for turn, name, recipe in recipes_in_turn():
        cast = jax.vmap(lambda x, recipe=recipe: breccia.cast(x, recipe))
        values = jax.vmap(lambda x, recipe=recipe: breccia.dequantize(breccia.cast(x, recipe)))
        reference, back = cast(jnp.asarray(x)), of_bytes(values(jnp.asarray(x)))
        specs = (P("d"), P("a", None, "d"), P(None, "d", "a"), P(None, None, "d"))
        for kind, spec in some(itertools.product((AxisType.Explicit, AxisType.Auto), specs), turn):
            with jax.set_mesh(mesh(kind)):
                placed = jax.device_put(x, NamedSharding(mesh(kind), spec))
                same(jax.jit(cast)(placed), reference, (name, kind, spec))
                assert of_bytes(jax.jit(values)(placed)) == back, (name, kind, spec)


def inside_of_checked_shard_map():
    """Of parts by themselves, where jax checks over which axes results vary; with some axes left to the compiler."""
    x = cases.normal((64, 256))
    for turn, name, recipe in recipes_in_turn():
        for kind, names in some(itertools.product((AxisType.Auto, AxisType.Explicit), ({"a"}, {"a", "d"})), turn):

            def part(x, recipe=recipe):
                q = breccia.cast(x, recipe)
                return breccia.dequantize(q), breccia.dequantize(breccia.requantize(q, "int8")), breccia.linear(x, q)

            reference = [np.concatenate(parts) for parts in zip(*map(part, np.split(x, 2)), strict=True)]
            split = jax.shard_map(part, mesh=mesh(kind), in_specs=P("a"), out_specs=P("a"), axis_names=names)
            made = jax.jit(split)(jax.device_put(x, NamedSharding(mesh(kind), P("a"))))
            for one, other in zip(made, reference, strict=True):
                close(one, other, (name, kind, names))
            assert of_bytes(made[0]) == of_bytes(reference[0]), (name, kind, names)


def explicit_axes():
    x = values()
    explicit = mesh(AxisType.Explicit)
    for turn, name in enumerate(FEW):
        recipe = cases.RECIPES[name]
        reference = breccia.cast(jnp.asarray(x), recipe)
        with jax.set_mesh(explicit):
            for spec in some(SPECS[:4], turn):
                placed = jax.device_put(x, spec)
                made = jax.jit(lambda x, recipe=recipe: breccia.cast(x, recipe))(placed)
                same(made, reference, (name, spec))
                back = jax.jit(breccia.dequantize)(made)
                assert np.asarray(back).tobytes() == np.asarray(breccia.dequantize(reference)).tobytes(), (name, spec)
                if legal(x.shape, spec, reference):
                    assert made.data.sharding.spec == P(*spec, *[None] * (2 - len(spec))), (name, made.data.sharding)
                    assert back.sharding.is_equivalent_to(placed.sharding, 2), (name, back.sharding)


def explicit_axes_of_conversions_and_batches():
    x = cases.normal((4, 64, 128))
    recipe = cases.RECIPES["mxfp8"]
    q, w = breccia.cast(jnp.asarray(x), recipe), breccia.cast(jnp.asarray(cases.normal((64, 128), seed=3)), recipe)
    product, single = jax.jit(breccia.matmul)(q, q.mT), jax.jit(breccia.linear)(x, w)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        placed = jax.jit(lambda x: breccia.cast(x, recipe))(jax.device_put(x, P("d")))
        same(placed, q, "batch")
        for to in ("nvfp4", "block", "int8"):
            made = jax.jit(lambda q, to=to: breccia.requantize(q, cases.RECIPES[to]))(placed)
            same(made, breccia.requantize(q, cases.RECIPES[to]), to)
            assert made.data.sharding.spec == (P(None, None, None) if to == "nvfp4" else P("d", None, None)), to
        batch = jax.jit(breccia.matmul)(placed, placed.mT)
        assert np.asarray(batch).tobytes() == np.asarray(product).tobytes()
        assert batch.sharding.spec == P("d", None, None), batch.sharding
        for spec in (P("d"), P(None, "d"), P(None, None, "d")):  # whole tokens, or features, which are gathered
            made = jax.jit(breccia.linear)(jax.device_put(x, spec), jax.device_put(w, P()))
            assert np.asarray(made).tobytes() == np.asarray(single).tobytes(), spec


def draws_follow_positions():
    x = values()
    for name in ("nvfp4", "current"):
        recipe = cases.RECIPES[name]
        for turn, seed in enumerate((7, 2**40 + 3)):
            reference = breccia.cast(jnp.asarray(x), recipe, rounding="stochastic", seed=seed)
            for spec in some(SPECS, turn, 3):
                placed = jax.device_put(x, NamedSharding(mesh(), spec))

                def cast(x, recipe=recipe, seed=seed):
                    return breccia.cast(x, recipe, rounding="stochastic", seed=seed)

                same(jax.jit(cast)(placed), reference, (name, spec))


def rotations_and_square_blocks():
    x = values()
    for name in ("mxfp8", "nvfp4"):
        for options in ({"hadamard": breccia.Hadamard(16, 3)}, {"square_blocks": True}):
            reference = breccia.cast(jnp.asarray(x), cases.RECIPES[name], **options)
            placed = jax.device_put(x, NamedSharding(mesh(), P("d")))
            made = jax.jit(lambda x, name=name, options=options: breccia.cast(x, cases.RECIPES[name], **options))(
                placed
            )
            same(made, reference, (name, options))


def values_stay_where_codes_are():
    x = values()
    for turn, name, recipe in recipes_in_turn():
        tensor = breccia.cast(jnp.asarray(x), recipe)
        reference = np.asarray(breccia.dequantize(tensor, "bfloat16"))
        specs = [spec for spec in (SPECS[:4] if name in FEW else SPECS[:2]) if legal(x.shape, spec, tensor)]
        for spec in some(specs, turn):
            placed = jax.device_put(tensor, sharding.shardings(tensor, NamedSharding(mesh(), spec)))
            compiled = jax.jit(lambda q: breccia.dequantize(q, "bfloat16")).lower(placed).compile()
            made = compiled(placed)
            assert np.asarray(made).tobytes() == reference.tobytes(), (name, spec)
            assert made.sharding.is_equivalent_to(NamedSharding(mesh(), spec), 2), (name, spec, made.sharding)
            assert not moved(compiled), (name, spec, moved(compiled))
    tensor = breccia.cast(jnp.asarray(x), "mxfp8")
    placed = jax.device_put(tensor, sharding.shardings(tensor, NamedSharding(mesh(), P("d"))))
    turned = jax.jit(lambda q: breccia.dequantize(q.mT))(placed)
    assert np.asarray(turned).tobytes() == np.ascontiguousarray(np.asarray(breccia.dequantize(tensor)).T).tobytes()


def products_gather_codes():
    x = jnp.asarray(cases.normal((64, 512), seed=2))
    pairs = (
        (P(), P("d")),  # columns of a layer
        (P(("a", "d")), P()),  # tokens
        (P("a"), P("d")),  # both
        (P(("a", "d")), P(("a", "d"))),  # FSDP: codes are gathered
    )
    for turn, name in enumerate(FEW):
        recipe = cases.RECIPES[name]
        w = breccia.cast(jnp.asarray(values((512, 512))), recipe)
        for x_spec, w_spec in some([pair for pair in pairs if legal(w.shape, pair[1], w)], turn, 2):
            placed = jax.device_put(w, sharding.shardings(w, NamedSharding(mesh(), w_spec)))
            tokens = jax.device_put(x, NamedSharding(mesh(), x_spec))
            fsdp = x_spec == w_spec
            results = {"out_shardings": NamedSharding(mesh(), x_spec)} if fsdp else {}
            compiled = jax.jit(breccia.linear, **results).lower(tokens, placed).compile()
            made = compiled(tokens, placed)
            # Few tokens may take another kernel than many, which adds in another order: each device's own are compared.
            rows = made.sharding.shard_shape(made.shape)[0]
            reference = [np.asarray(breccia.linear(x[i : i + rows], w)) for i in range(0, len(x), rows)]
            assert np.asarray(made).tobytes() == np.concatenate(reference).tobytes(), (name, x_spec, w_spec)
            large = [one for one in moved(compiled) if one[2] > 512 * 512 // 16 and one[0] == "all-gather"]
            assert {dtype for _, dtype, _ in large} <= {"u8", "s8"}, (name, x_spec, w_spec, moved(compiled))
            assert bool(large) == fsdp, (name, x_spec, w_spec, moved(compiled))
            assert not made.sharding.is_fully_replicated


def conversions_stay_where_codes_are():
    x = values((512, 512))
    goals = ("mxfp8", "block-128x128", "int4-asymmetric", "current-row", "nvfp4", "current")
    for turn, name in enumerate(FEW):
        tensor = breccia.cast(jnp.asarray(x), cases.RECIPES[name])
        specs = [spec for spec in SPECS[:4] if legal(x.shape, spec, tensor)]
        for to in some([to for to in goals if to != name], turn, 2):
            recipe = cases.RECIPES[to]
            reference = breccia.requantize(tensor, recipe)
            for spec in some(specs, turn + goals.index(to)):
                placed = jax.device_put(tensor, sharding.shardings(tensor, NamedSharding(mesh(), spec)))
                compiled = jax.jit(lambda q, recipe=recipe: breccia.requantize(q, recipe)).lower(placed).compile()
                made = compiled(placed)
                what = (name, to, spec)
                same(made, reference, what)
                searched = to in ("nvfp4", "current") or (to == "current-row" and spec in (SPECS[1], SPECS[3]))
                if legal(x.shape, spec, reference) and not searched:
                    assert not moved(compiled), (what, moved(compiled))
                    wanted = sharding.shardings(reference, NamedSharding(mesh(), spec))
                    assert made.data.sharding.is_equivalent_to(wanted.data, 2), (what, made.data.sharding)
                large = {dtype for _, dtype, n in moved(compiled) if n >= 512 * 512 // 32}
                assert large <= {"u8", "s8"}, (what, moved(compiled))
    turned = jax.jit(lambda q: breccia.requantize(q.mT, "mxfp8")).lower(placed).compile()
    same(turned(placed), breccia.requantize(tensor.mT, "mxfp8"), "turned")
    assert {dtype for _, dtype, n in moved(turned) if n > 512} <= {"s8"}, moved(turned)


def products_of_batches_stay_split():
    a, b = cases.normal((4, 64, 256)), cases.normal((4, 128, 256), seed=3)
    ways = (
        (P("d"), P("d"), P("d"), False),  # members
        (P(("a", "d")), P(), P(("a", "d")), False),
        (P(None, "d"), P(), P(None, "d"), False),  # rows
        (P("a", "d"), P("a"), P("a", "d"), False),
        (P("a"), P("a", "d"), P("a", None, "d"), False),  # columns
        (P("d"), P(None, "d"), None, True),  # one axis of the mesh for two of the result
        (P(None, None, "d"), P(None, None, "d"), P(None), True),  # what is summed over
    )
    for turn, name in enumerate(("current", "mxfp8", "nvfp4", "int8")):
        q, w = (breccia.cast(jnp.asarray(x), cases.RECIPES[name]) for x in (a, b))
        reference = np.asarray(breccia.matmul(q, w.mT))
        for q_spec, w_spec, out, travels in some(ways, turn, 2):
            placed = [
                jax.device_put(one, sharding.shardings(one, NamedSharding(mesh(), spec)))
                for one, spec in ((q, q_spec), (w, w_spec))
            ]
            compiled = jax.jit(lambda a, b: breccia.matmul(a, b.mT)).lower(*placed).compile()
            made = compiled(*placed)
            what = (name, q_spec, w_spec)
            assert np.asarray(made).tobytes() == reference.tobytes(), what
            there = made.sharding.is_equivalent_to(NamedSharding(mesh(), out), 3) if out else made.sharding.spec
            assert there, (what, made.sharding)
            assert bool(moved(compiled)) == travels, (what, moved(compiled))
            assert {dtype for _, dtype, n in moved(compiled) if n > 1024} <= {"u8", "s8"}, (what, moved(compiled))
    one = breccia.cast(jnp.asarray(b[:1]), "mxfp8")  # a weight for all members
    placed = jax.device_put(a, NamedSharding(mesh(), P("d"))), jax.device_put(one, NamedSharding(mesh(), P()))
    compiled = jax.jit(lambda x, w: breccia.matmul(x, w.mT)).lower(*placed).compile()
    made = compiled(*placed)
    assert np.asarray(made).tobytes() == np.asarray(breccia.matmul(jnp.asarray(a), one.mT)).tobytes()
    assert made.sharding.is_equivalent_to(NamedSharding(mesh(), P("d")), 3) and not moved(compiled)


def gradients_and_vmap():
    x = jax.device_put(cases.normal((64, 512), seed=2), NamedSharding(mesh(), P("d")))
    w = jnp.asarray(values((512, 512)))
    recipes = autograd.LinearRecipes.fp8()

    def loss(x, w):
        return jnp.sum(autograd.linear(x, w, recipes=recipes) ** 2)

    got = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    wanted = jax.jit(jax.grad(loss, (0, 1)))(jnp.asarray(np.asarray(x)), w)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=1e-4)
    batch = jnp.asarray(cases.normal((3, 64, 128)))
    made = jax.vmap(lambda x: breccia.cast(x, "nvfp4"))(batch)
    for i in range(3):
        same(jax.tree.map(lambda part, i=i: part[i], made), breccia.cast(batch[i], "nvfp4"), i)


def parts_inside_of_shard_map():
    x = values()
    for turn, kind in enumerate((AxisType.Auto, AxisType.Explicit)):
        devices = mesh(kind)
        for name in FEW:
            recipe = cases.RECIPES[name]
            reference = breccia.cast(jnp.asarray(x), recipe)
            for dim in some((0, 1), turn + FEW.index(name)):
                spec = P("d") if dim == 0 else P(None, "d")
                if not legal(x.shape, spec, reference) or not recipe_is_split(recipe):
                    continue

                def part(x, recipe=recipe, dim=dim):
                    return sharding.cast(x, recipe, "d", dim)

                def whole(q, dim=dim):
                    return sharding.all_gather(q, "d", dim)

                shape = jax.eval_shape(
                    lambda x, recipe=recipe: breccia.cast(x, recipe), jax.ShapeDtypeStruct(x.shape, x.dtype)
                )
                specs = sharding.specs(shape, spec, devices)
                split = jax.shard_map(part, mesh=devices, in_specs=spec, out_specs=specs, check_vma=False)
                made = jax.jit(split)(jax.device_put(x, NamedSharding(devices, spec)))
                same(made, reference, (name, dim))
                gather = jax.jit(jax.shard_map(whole, mesh=devices, in_specs=(specs,), out_specs=P(), check_vma=False))
                same(gather(made), reference, (name, dim))
                travels = moved(gather.lower(made).compile())
                assert {dtype for _, dtype, n in travels if n > 64 * 1024} <= {"u8", "s8"}, (name, travels)


def cuts_through_blocks_are_named():
    tensor = breccia.cast(jnp.asarray(cases.normal((256, 64))), breccia.Float8BlockScaling(block_m=128))
    try:
        sharding.shardings(tensor, NamedSharding(mesh(), P(("a", "d"))))
    except ValueError as error:
        assert "must cut axis 0 of (256, 64) into equal parts of whole blocks of 128, got 4 parts" in str(error)
    else:
        raise AssertionError
    x = jax.device_put(cases.normal((250, 64)), NamedSharding(mesh(), P("d")))  # parts of 125 rows
    reference = breccia.cast(jnp.asarray(np.asarray(x)), breccia.Float8BlockScaling(block_m=128))
    same(jax.jit(lambda x: breccia.cast(x, breccia.Float8BlockScaling(block_m=128)))(x), reference, "gathered")


if __name__ == "__main__":
    assert len(jax.devices()) == 4
    for name in sys.argv[1].split(","):
        print(name, flush=True)
        globals()[name]()
