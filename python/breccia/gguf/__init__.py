# SPDX-License-Identifier: Apache-2.0
"""GGUF files: the container, and a model's tensors, parameters and tokenizer as llama.cpp names them."""

from breccia import checkpoint  # noqa: F401 (first: it reads these files, with what is its own to read files with)
