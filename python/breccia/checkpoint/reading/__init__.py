# SPDX-License-Identifier: Apache-2.0
"""Which logical tensors a checkpoint has, and their values: of headers first, of bytes when they are asked for."""
