# SPDX-License-Identifier: Apache-2.0
"""breccia.distributed over gloo: what the ranks make together is byte for byte what one process makes."""

import datetime
import hashlib
import time
from functools import partial

import breccia
import cases
import numpy as np
import pytest
from test_cast_parts import can_be_cut, crosses

torch = pytest.importorskip("torch")
import distributed_ranks  # noqa: E402

if not torch.distributed.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
import torch.distributed as dist  # noqa: E402
from breccia import distributed  # noqa: E402
from breccia.distributed.gather import agreement, groups, in_place  # noqa: E402

SHAPES = [(256, 256), (390, 256), (3, 256)]  # even; ragged; fewer rows than ranks


def digest(scaled):
    if scaled.layout.axis == -2:
        scaled = scaled.mT
    hashed = hashlib.sha256(f"{scaled.shape} {scaled.recipe} {scaled.layout}".encode())
    for part in (scaled.data, scaled.scale, scaled.zero_point, scaled.global_scale):
        if part is not None:
            part = part.reshape(1) if part.ndim == 0 else part
            part = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
            hashed.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def tensor(shape, seed=0):
    x = torch.from_numpy(cases.heavy_tailed("normal", shape, seed))
    x[-1, -1] = 1e4  # the last rank has the whole's amax
    return x


def fits(recipe, shape):
    try:
        breccia.cast(np.zeros(shape, np.float32), recipe)
    except ValueError:
        return False
    return True


def possible():
    for recipe in cases.RECIPES.values():
        for shape in SHAPES:
            for dim in (0, 1):
                if fits(recipe, shape) and can_be_cut(recipe, dim):
                    yield recipe, shape, dim


def gathers(rank, world):
    tried = set()
    for recipe, shape, dim in possible():
        x = tensor(shape)
        whole, dealt = breccia.cast(x, recipe), distributed.plan(shape, recipe, world, dim)
        part = distributed.cast(dealt.cut(x, rank), recipe, plan=dealt)
        what = (recipe, shape, dim)
        assert digest(part) == digest(dealt.cut(whole, rank)), what
        assert digest(distributed.all_gather(part, dim=dim)) == digest(whole), what
        assert digest(distributed.all_gather(part, dim=dim, plan=dealt)) == digest(whole), what
        handle = distributed.all_gather(part.mT, dim=1 - dim, async_op=True)
        turned = handle.wait()
        assert handle.wait() is turned and turned.shape == shape[::-1]
        assert digest(turned) == digest(whole), what
        tried.add(what)
    assert len(tried) > 100


def tells_once(rank, world):
    x = tensor((256, 256))
    dealt = distributed.plan(x.shape, "mxfp8", world)
    part = distributed.cast(dealt.cut(x, rank), "mxfp8", plan=dealt)
    with Collectives() as first:
        distributed.all_gather(part, plan=dealt)
    with Collectives() as second:
        distributed.all_gather(part, plan=distributed.plan(x.shape, "mxfp8", world))
    assert (first.count, second.count) == (2, 1)


def repeats(rank, world):
    """Gathers by one plan: of other values, of scales that the ranks did not make together, of another form."""
    together = 0
    for recipe, shape, dim in possible():
        if dim or shape[0] % (128 * world):
            continue
        dealt = distributed.plan(shape, recipe, world)
        for seed in range(3):
            x = tensor(shape, seed)
            part = distributed.cast(dealt.cut(x, rank), recipe, plan=dealt)
            assert (in_place.known(part, 0, dealt, None) is not None) == bool(seed), recipe
            assert agreement.has_one_scale(part, None) == crosses(recipe, dim), recipe
            assert digest(distributed.all_gather(part, plan=dealt)) == digest(breccia.cast(x, recipe)), (recipe, seed)
        if crosses(recipe, dim):
            together += 1
            own = breccia.cast(dealt.cut(x, rank), recipe)
            says(ValueError, "for the whole has only one", partial(distributed.all_gather, own, plan=dealt))
    assert together > 3
    dealt = distributed.plan((256, 256), "mxfp8", world)
    half = breccia.cast(tensor((128, 256)).bfloat16(), "mxfp8")
    assert distributed.all_gather(half, plan=dealt).original_dtype == "bfloat16"
    wide = breccia.cast(tensor((128, 512)), "mxfp8")
    says(ValueError, "scaled must be the part that the plan gives", partial(distributed.all_gather, wide, plan=dealt))


def test_gathers_by_one_plan():
    distributed_ranks.run(2, repeats)


class Collectives(torch.utils._python_dispatch.TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def test_a_plan_is_checked_once():
    distributed_ranks.run(2, tells_once)


def rounds_as_one_process(rank, world):
    for recipe, shape, dim in possible():
        x, dealt = tensor(shape), distributed.plan(shape, recipe, world, dim)
        whole = breccia.cast(x, recipe, rounding="stochastic", seed=3)
        part = distributed.cast(dealt.cut(x, rank), recipe, plan=dealt, rounding="stochastic", seed=3)
        assert digest(part) == digest(dealt.cut(whole, rank)), (recipe, shape, dim)


def sends_from_one(rank, world):
    for recipe, shape, dim in possible():
        whole = breccia.cast(tensor(shape), recipe)
        src = world - 1
        got = distributed.broadcast(whole if rank == src else None, src)
        assert digest(got) == digest(whole) and got.original_dtype == whole.original_dtype
        dealt = distributed.plan(shape, recipe, world, dim)
        expected = dealt.cut(whole, rank)
        assert digest(distributed.scatter(whole if rank == src else None, src, dim=dim)) == digest(expected)
        turned = distributed.scatter(whole.mT if rank == src else None, src, dim=1 - dim, async_op=True).wait()
        assert turned.shape == expected.shape[::-1] and digest(turned) == digest(expected)


def exchanges(rank, world):
    generator = np.random.default_rng(5)
    for recipe in cases.RECIPES.values():
        block = distributed.plan((8, 256), recipe, 1).block
        rows = generator.integers(0, 3, (world, world)) * block  # from, to
        sent = [tensor((max(int(rows[i].sum()), 1), 256), i) for i in range(world)]
        amax = (
            torch.stack(
                [x[: int(rows[i].sum())].abs().max() if rows[i].sum() else x.new_zeros(()) for i, x in enumerate(sent)]
            ).max()
            if crosses(recipe, 0)
            else None
        )
        if amax is not None and not can_be_cut(recipe, 0):
            continue
        scaled = [breccia.cast(x[: int(rows[i].sum())], recipe, amax=amax) for i, x in enumerate(sent)]
        got = distributed.all_to_all(scaled[rank], rows[:, rank].tolist(), rows[rank].tolist())
        runs = []
        for i in range(world):
            begin = int(rows[i, :rank].sum())
            runs.append(breccia.dequantize(scaled[i][begin : begin + int(rows[i, rank])]))
        assert got.shape == (int(rows[:, rank].sum()), 256)
        assert torch.equal(breccia.dequantize(got), torch.cat(runs)), recipe


def sums(rank, world):
    for recipe, shape, dim in [(r, s, d) for r in cases.RECIPES.values() for s in SHAPES for d in (0, 1)]:
        if not fits(recipe, shape):
            continue
        everyone = [tensor(shape, i) for i in range(world)]
        dealt = distributed.plan(shape, recipe, world, dim)
        total = breccia.dequantize(breccia.cast(everyone[0], recipe))
        for x in everyone[1:]:
            total = total + breccia.dequantize(breccia.cast(x, recipe))
        got = distributed.reduce_scatter(everyone[rank], recipe, dim=dim, async_op=True).wait()
        assert torch.equal(got, dealt.cut(total, rank)), (recipe, shape, dim)


def packs_amax_of_a_model(rank, world):
    model = [tensor((64, 256), i) for i in range(5)]
    model[1][3, 3], model[2][40, 1] = torch.nan, torch.inf
    calls = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *a, **k: calls.append(a) or all_reduce(*a, **k)
    parts = [x.chunk(world)[rank] for x in model]
    found = distributed.amax(parts, "nvfp4")
    assert len(calls) == (1 if world else 0)
    for x, value in zip(model, found, strict=True):
        assert value == x[torch.isfinite(x)].abs().max() and value.shape == ()
    assert distributed.amax(parts, "mxfp8") == [None] * 5
    assert distributed.amax(parts, breccia.INT8Scaling()) == [None] * 5
    by_row = distributed.amax([x.chunk(world, 1)[rank] for x in model], breccia.INT8Scaling(), dim=1)
    assert by_row[0].shape == (64,) and by_row[1].isnan().nonzero().tolist() == [[3]]
    assert len(calls) == 2


def everything(rank, world):
    for body in (gathers, rounds_as_one_process, sends_from_one, exchanges, sums, packs_amax_of_a_model):
        body(rank, world)


@pytest.mark.parametrize(
    "world", [1, pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_ranks_make_what_one_process_makes(world):
    distributed_ranks.run(world, everything)


def says(error, message, call):
    with pytest.raises(error) as info:
        call()
    assert message in str(info.value), str(info.value)


def refuses(rank, world):
    x = tensor((256, 256))
    tile = breccia.Float8BlockScaling(block_m=128)
    rows = [100, 156][rank]
    cut = breccia.cast(x[:rows], tile)
    says(
        ValueError,
        "the part of rank 0 must be whole blocks of 128 long along axis -2, got 100: legal cuts are the "
        "multiples of 128",
        lambda: distributed.all_gather(cut),
    )
    own = breccia.cast(x.chunk(2)[rank], "fp8")
    says(ValueError, "cast with amax=breccia.distributed.amax(...)", lambda: distributed.all_gather(own))
    other = breccia.cast(x.chunk(2)[rank], ["mxfp8", "nvfp4"][rank])
    says(
        ValueError,
        "rank 1 has another recipe, layout, dtype or shape than rank 0",
        lambda: distributed.all_gather(other),
    )
    dealt = distributed.plan((256, 256), "mxfp8", 2)
    says(
        ValueError,
        "rank 1 has another recipe, layout, dtype or shape than rank 0 of group '0' of the ranks 0, 1 (seen by rank",
        lambda: distributed.all_gather(other, plan=dealt),
    )
    uneven = breccia.cast(x[: [100, 128][rank]], "mxfp8")
    says(
        ValueError,
        "rank 0 of group '0' of the ranks 0, 1 has 100 along dim 0 where the plan gives it (128, 256)",
        lambda: distributed.all_gather(uneven, plan=dealt),
    )
    half = breccia.cast(x.chunk(2)[rank], "mxfp8")
    says(
        ValueError,
        "in_splits must sum to scaled.shape[0], 128, got 127",
        lambda: distributed.all_to_all(half, [64, 64], [64, 63]),
    )
    says(
        ValueError,
        "out_splits must have 2 numbers, one for each rank, none negative, got [128]",
        lambda: distributed.all_to_all(half, [128], [64, 64]),
    )
    says(ValueError, "src must be a rank of the group, 0 to 1, got 2", lambda: distributed.broadcast(half, 2))
    says(TypeError, "scaled must be a ScaledTensor of torch tensors, got Tensor", lambda: distributed.all_gather(x))
    says(
        TypeError,
        "scaled must be a ScaledTensor of torch tensors, got one of ndarray",
        lambda: distributed.all_gather(half.to("numpy")),
    )
    # What one rank gets wrong leaves no other waiting.
    error, message = (TypeError, "got NoneType") if rank == 0 else (RuntimeError, "rank 0 of the group had nothing to")
    says(error, message, lambda: distributed.broadcast(None, 0))
    says(error, message, lambda: distributed.scatter(None, 0))
    dealt = distributed.plan((256, 256), "nvfp4", 2)
    if rank == 0:
        says(
            ValueError,
            "x must have the shape that the plan gives rank 0",
            lambda: distributed.cast(x, "nvfp4", plan=dealt),
        )
    else:
        distributed.cast(dealt.cut(x, 1), "nvfp4", plan=dealt)
    dealt = distributed.plan((256, 256), "mxfp8", 2)
    says(
        ValueError,
        f"x must have the shape that the plan gives rank {rank}, (128, 256), got (256, 256)",
        lambda: distributed.cast(x, "mxfp8", plan=dealt),
    )
    says(
        ValueError,
        "plan is required for rounding='stochastic'",
        lambda: distributed.cast(x, "mxfp8", rounding="stochastic", seed=1),
    )


def wrong_on_one_rank(rank, world):
    """What one rank passes, and the others; each after a gather by one plan that all have agreed on."""
    x = tensor((384, 384))
    for recipe in ("mxfp8", "nvfp4", breccia.INT8Scaling(), breccia.INT4Scaling(symmetric=False, signed=False)):
        for dim in (0, 1):
            dealt = distributed.plan((384, 384), recipe, world, dim)
            part = breccia.cast(dealt.cut(x, rank), recipe, amax=distributed.amax([x], recipe, dim=dim)[0])
            wide = breccia.cast(x, recipe)
            yield part, "a tensor", partial(distributed.all_gather, dim=dim)
            yield part, part.to("numpy"), partial(distributed.all_gather, plan=dealt)
            yield part, None, partial(distributed.all_gather, plan=dealt)
            yield part, wide, partial(distributed.all_gather, plan=dealt)
    yield x, x.numpy(), partial(distributed.cast, recipe="nvfp4")
    yield [x], [None], partial(distributed.amax, recipe="fp8")
    yield x, None, partial(distributed.reduce_scatter, recipe="mxfp8")
    yield x, x.numpy(), partial(distributed.reduce_scatter, recipe="mxfp8")
    yield [x], x, partial(distributed.amax, recipe="fp8")
    half = breccia.cast(x, "mxfp8")
    yield (
        half,
        half.mT,
        partial(distributed.all_to_all, in_splits=[384 // world] * world, out_splits=[384 // world] * world),
    )


def other_forms_on_one_rank(world):
    """What the ranks pass and one of them, of which each alone is right."""
    x, wide = tensor((384, 384)), tensor((384, 512))
    splits = [384 // world] * world
    sends = partial(distributed.all_to_all, in_splits=splits, out_splits=splits)
    yield breccia.cast(x, "mxfp8"), breccia.cast(wide, "mxfp8"), sends
    yield breccia.cast(x, "mxfp8"), breccia.cast(x, "nvfp4"), sends
    yield x, wide, partial(distributed.reduce_scatter, recipe="mxfp8")
    yield x, tensor((256, 384)), partial(distributed.reduce_scatter, recipe="mxfp8")
    yield [x], [x, x], partial(distributed.amax, recipe="fp8")
    yield [x], [wide.T], partial(distributed.amax, recipe="fp8-row", dim=1)
    yield x, wide.T, partial(distributed.cast, recipe="fp8-row", dim=1)


def tells_who_failed(rank, world):
    for right, wrong, collective in other_forms_on_one_rank(world):
        with pytest.raises(ValueError, match="rank 1 has another recipe, layout, dtype or shape than rank 0"):
            collective(wrong if rank == 1 else right)
    for right, wrong, collective in wrong_on_one_rank(rank, world):
        group = dist.new_group(timeout=datetime.timedelta(seconds=60))
        if getattr(collective, "keywords", {}).get("plan") is not None:
            for _ in range(2):
                collective(right, group=group)
        began = time.monotonic()
        with pytest.raises(Exception) as info:
            collective(wrong if rank == 1 else right, group=group)
        assert time.monotonic() - began < 20, collective
        named = f"rank 1 of group {group.group_name!r} of the ranks" in str(info.value)
        assert named == (rank != 1), info.value


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_fails_tells_the_others_at_once(world):
    distributed_ranks.run(world, tells_who_failed)


def needs_others_alone(rank, world):
    """One rank goes on, for its call asks nobody; the others wait for it, whether they have agreed before or not."""
    groups._PATIENCE = datetime.timedelta(seconds=0.02)
    x = tensor((384, 384))
    recipes = cases.RECIPES.values()
    asking = {(type(r), r.layout.block, dim): r for r in recipes for dim in (0, 1) if crosses(r, dim)}
    assert {recipe.name for recipe in asking.values()} >= {"nvfp4", "current", "int8"}
    for number, ((*_, dim), recipe) in enumerate(asking.items()):
        call = partial(distributed.cast, recipe=recipe, dim=dim)
        group = dist.new_group(timeout=datetime.timedelta(seconds=60))
        if number % 2:
            for other in (call, partial(call, recipe="mxfp8")):
                other(x, group=group)
        distributed.cast(x, "mxfp8", group=group)  # which nobody waits for
        distributed.amax([], "fp8", group=group)
        if rank == 1:
            call(x, group=group, recipe="mxfp8")
            distributed.cast(x, "mxfp4", group=group)
            continue
        began = time.monotonic()
        said = f"rank 1 of group '{group.group_name}' of the ranks .* needs no other rank's scales for its own"
        with pytest.raises(ValueError, match=said):
            call(x, group=group)
        assert time.monotonic() - began < 20, call


def sources_differ(rank, world):
    x = breccia.cast(tensor((384, 384)), "mxfp8")
    for call in (distributed.broadcast, distributed.scatter):
        for one, others in ((0, 1), (1, 0)):
            group = dist.new_group(timeout=datetime.timedelta(seconds=60))
            for src in (0, 1):
                call(x, src, group)
            with pytest.raises(
                ValueError, match=r"src must be alike on all ranks, but rank \d passed another than rank 0"
            ):
                call(x, one if rank == 1 else others, group)
    with pytest.raises(ValueError, match=r"dim must be alike on all ranks, but rank 1 passed another than rank 0"):
        distributed.scatter(x, dim=rank == 1)
    distributed.scatter(x, dim=-1 if rank == 1 else 1)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("body", [needs_others_alone, sources_differ])
def test_ranks_that_ask_for_different_things_hear_of_it(body, world):
    distributed_ranks.run(world, body)


def gathers_nan(rank, world):
    for recipe, shape, dim in possible():
        x = tensor(shape)
        x[1, -1] = float("nan")
        whole, dealt = breccia.cast(x, recipe), distributed.plan(shape, recipe, world, dim)
        part = distributed.cast(dealt.cut(x, rank), recipe, plan=dealt)
        for gathered in (distributed.all_gather(part, dim=dim), distributed.all_gather(part, plan=dealt)):
            same = breccia.dequantize(gathered).view(torch.int32) == breccia.dequantize(whole).view(torch.int32)
            assert same.all() and digest(gathered) == digest(whole), (recipe, shape, dim)


def test_nan_is_gathered_as_it_is():
    distributed_ranks.run(2, gathers_nan)


def test_errors_name_what_is_wrong():
    distributed_ranks.run(2, refuses)
    says(RuntimeError, "torch.distributed is not initialized", lambda: distributed.amax([tensor((64, 64))], "fp8"))


def test_plans():
    assert distributed.plan((300, 64), "mxfp8", 2).ranges == ((0, 150), (150, 300))
    tile = breccia.Float8BlockScaling(block_m=128)
    dealt = distributed.plan((390, 256), tile, 3)
    assert (dealt.block, dealt.ranges) == (128, ((0, 256), (256, 390), (390, 390)))
    assert distributed.plan((64, 96), "mxfp4", 2, -1).ranges == ((0, 64), (64, 96))
    assert distributed.plan((3, 64), "mxfp8", 4).ranges == ((0, 1), (1, 2), (2, 3), (3, 3))
    assert distributed.plan((8, 4, 64), "nvfp4", 4).offset(1) == (2 * 4 * 64, 64)
    says(
        ValueError,
        "dim must be the first axis longer than 1, or the last",
        lambda: distributed.plan((8, 4, 64), "nvfp4", 2, 1).offset(1),
    )
    says(ValueError, "world must be 1 or more, got 0", lambda: distributed.plan((8, 64), "mxfp8", 0))
    says(
        ValueError,
        "dim must be from -2 to 1 for shape (8, 64), got 2",
        lambda: distributed.plan((8, 64), "mxfp8", 2, 2),
    )


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 64])
def test_plans_of_single_rows_are_chunks(rows, world):
    chunks = [len(c) for c in torch.empty(rows, 64).chunk(world)] if rows else [0]
    dealt = [b - a for a, b in distributed.plan((rows, 64), "mxfp8", world).ranges]
    assert [n for n in dealt if n] == [n for n in chunks if n]
