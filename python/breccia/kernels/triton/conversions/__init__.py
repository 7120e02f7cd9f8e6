# SPDX-License-Identifier: Apache-2.0
"""Kernels that dequantize, and those that go from recipe to recipe."""
