# SPDX-License-Identifier: Apache-2.0
"""Another name of `breccia.bridges.dlpack`."""

from breccia.bridges.dlpack import Capsules, from_dlpack, to_dlpack

__all__ = ["Capsules", "from_dlpack", "to_dlpack"]
