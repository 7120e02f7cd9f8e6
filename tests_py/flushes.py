# SPDX-License-Identifier: Apache-2.0
"""Makes flushes to the disk take no time where it is imported: conversions of tests flush thousands of small files, for
milliseconds each, and no test takes the power away. What `breccia.checkpoint.files.disk` calls, and when, is as
elsewhere; programs that tests start flush as they do at home."""

import os


def _flush(fd: int) -> None:
    os.fstat(fd)  # what is not open is an error, as there


os.fsync = _flush
