# SPDX-License-Identifier: Apache-2.0
"""The frameworks that are installed, each as the few functions the tests need."""

import importlib.util

import numpy as np
import pytest
import required_peers

ml_dtypes = pytest.importorskip("ml_dtypes")


class NumPy:
    name = "numpy"

    def array(self, x):
        return x

    def host(self, x):
        """The same bytes as a NumPy array."""
        return np.asarray(x)

    def is_one(self, x):
        return isinstance(x, (np.ndarray, np.generic))


class Torch:
    name = "torch"

    def __init__(self):
        import torch

        self.torch = torch
        low = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
        self.bytes = (*(getattr(torch, name) for name in low), torch.float4_e2m1fn_x2)

    def array(self, x):
        if x.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(x.view(np.uint16).copy()).view(self.torch.bfloat16)
        return self.torch.from_numpy(np.array(x))

    def host(self, x):
        x = x.detach()
        if x.dtype in self.bytes:
            x = x.view(self.torch.uint8)
        if x.dtype == self.torch.bfloat16:
            return x.view(self.torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()

    def is_one(self, x):
        return isinstance(x, self.torch.Tensor)


class Jax:
    name = "jax"

    def array(self, x):
        import jax.numpy as jnp

        return jnp.asarray(x)

    def host(self, x):
        return np.asarray(x)

    def is_one(self, x):
        import jax

        return isinstance(x, jax.Array)


class Mlx:
    name = "mlx"

    def array(self, x):
        import mlx.core as mx

        if x.dtype == ml_dtypes.bfloat16:
            return mx.array(x.view(np.uint16).copy()).view(mx.bfloat16)
        return mx.array(np.array(x))

    def host(self, x):
        import mlx.core as mx

        if x.dtype == mx.bfloat16:
            return np.array(x.view(mx.uint16)).view(ml_dtypes.bfloat16)
        return np.array(x)

    def is_one(self, x):
        import mlx.core as mx

        return isinstance(x, mx.array)


def _installed(name):
    module = {"mlx": "mlx.core"}.get(name, name)
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


_EVERY = (NumPy, Torch, Jax, Mlx)
PEERS = {peer.name: peer for peer in _EVERY if _installed(peer.name)}
assert len(PEERS) == len(_EVERY) or not required_peers.REQUIRED, f"REQUIRE_PEERS=1, but there are only {list(PEERS)}"
ALL = pytest.mark.parametrize("peer", [peer() for peer in PEERS.values()], ids=PEERS.keys())
OTHERS = pytest.mark.parametrize(
    "peer", [peer() for name, peer in PEERS.items() if name != "numpy"], ids=[n for n in PEERS if n != "numpy"]
)


def same_bytes(peer, mine, reference, what=""):
    """Whether an array of the framework holds the bytes of a NumPy one."""
    if reference is None:
        assert mine is None, what
        return
    assert peer.is_one(mine), f"{what}: {type(mine)}"
    a, b = np.ascontiguousarray(peer.host(mine)), np.ascontiguousarray(reference)
    assert a.shape == b.shape, f"{what}: {a.shape} != {b.shape}"
    np.testing.assert_array_equal(a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8), err_msg=what)


def same_parts(peer, mine, reference, what=""):
    for part in ("data", "scale", "zero_point", "global_scale"):
        same_bytes(peer, getattr(mine, part), getattr(reference, part), f"{what} {part}")
