"""The pictures of docs/report.md, from the report of a demo run:

    make demo && python docs/figures/report.py demo_out

Screenshots need Chromium (apt-get install chromium); without it they stay as they are.
"""

from __future__ import annotations

import argparse
import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from helpers import chromium  # noqa: E402

FIGURES = {
    "codes-dpq-sx-encoder-embed-tokens": "report-codes-sx",
    "codes-dpq-vq-encoder-embed-tokens": "report-codes-vq",
    "distances": "report-distances",
    "sizes": "report-sizes",
}
COLORS = 64  # of a screenshot: a fraction of the bytes, and no difference to see


def copy_figures(report: Path) -> None:
    for name, new in FIGURES.items():
        shutil.copy(report / "figures" / f"{name}.svg", HERE / f"{new}.svg")


def screenshots(page: Path) -> None:
    """The search in light, and the same page on a phone in dark."""
    profile = tempfile.mkdtemp()
    browser = chromium.Browser(Path(profile))
    for name, theme, width, height in (
        ("report-search", "light", 1100, 1000),
        ("report-phone", "dark", 390, 844),
    ):
        browser.theme(theme)
        browser.width(width, height)
        browser.open(page)
        browser.screenshot(HERE / f"{name}.png", whole=False)
        _shrink(HERE / f"{name}.png")
    browser.close()
    shutil.rmtree(profile, ignore_errors=True)


def _shrink(path: Path) -> None:
    picture = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
    picture.quantize(COLORS).save(path, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("demo", type=Path, help="the demo's output folder")
    report = parser.parse_args().demo / "report"
    copy_figures(report)
    if chromium.FOUND is None:
        print(chromium.WHY_NOT, file=sys.stderr)
    else:
        screenshots(report / "report.html")


if __name__ == "__main__":
    main()
