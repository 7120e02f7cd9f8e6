# SPDX-License-Identifier: Apache-2.0
"""What becomes of each tensor of a conversion, decided from headers alone."""
