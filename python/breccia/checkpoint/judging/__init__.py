# SPDX-License-Identifier: Apache-2.0
"""Looking at checkpoints: what is in them, how close two are, what is missing."""
