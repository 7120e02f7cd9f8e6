# SPDX-License-Identifier: Apache-2.0
"""What a ScaledTensor is made of and does by itself: slicing, joining, equality, pickling, display."""
