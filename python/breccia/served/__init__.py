# SPDX-License-Identifier: Apache-2.0
"""What serving programs with fused layers and tensor parallelism need of a checkpoint in breccia's own format."""
