# SPDX-License-Identifier: Apache-2.0
"""GGUF files: the container, and a model's tensors, parameters and tokenizer as llama.cpp names them."""
