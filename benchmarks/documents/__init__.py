# SPDX-License-Identifier: Apache-2.0
"""What make_docs.py writes: tables (accuracy, speed, gpu) and pictures."""
