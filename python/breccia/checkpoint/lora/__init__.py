# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters beside a checkpoint: read, and merged into it."""
