# SPDX-License-Identifier: Apache-2.0
"""Doing what was planned: one tensor at a time, resumed after a kill, there when complete."""
