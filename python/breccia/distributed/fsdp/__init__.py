# SPDX-License-Identifier: Apache-2.0
"""Layers under FSDP2: codes on the way, and codes at rest."""
