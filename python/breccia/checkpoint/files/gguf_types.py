# SPDX-License-Identifier: Apache-2.0
"""Types of GGUF's metadata: their numbers, and a table of fields."""

from typing import Any

__all__ = ["ARRAY", "BOOL", "FLOAT32", "INT32", "STRING", "UINT32", "Fields"]

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
Fields = dict[str, tuple[int, Any]]  # key → type and value
