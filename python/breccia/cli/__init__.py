# SPDX-License-Identifier: Apache-2.0
"""The `breccia` command: its parser, what it prints, and how it fails."""

from breccia.cli.command import main

__all__ = ["main"]
