# SPDX-License-Identifier: Apache-2.0
"""What programs of others that open a checkpoint in breccia's own format have in common: those that serve, with fused
layers and tensor parallelism, and libraries of models."""
