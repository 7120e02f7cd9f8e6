# SPDX-License-Identifier: Apache-2.0
"""``python -m breccia``."""

import sys

from breccia.cli import main

if __name__ == "__main__":
    sys.exit(main())
