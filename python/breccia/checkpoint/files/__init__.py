# SPDX-License-Identifier: Apache-2.0
"""Readers and writers of checkpoint files: safetensors and GGUF."""
