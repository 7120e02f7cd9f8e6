# SPDX-License-Identifier: Apache-2.0
"""Device code that the kernels share: codecs, decoding, words of several codes."""
