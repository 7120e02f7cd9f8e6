# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every format into models that are sharded."""
