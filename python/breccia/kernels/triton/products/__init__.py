# SPDX-License-Identifier: Apache-2.0
"""Kernels that multiply, and the choice among them."""
