# SPDX-License-Identifier: Apache-2.0
"""Kernels by name: `breccia.kernels.reference`, and `breccia.kernels.triton` where Triton is installed."""

from breccia.kernels import reference, triton

__all__ = ["reference", "triton"]
