"""Takes the picture of the page that `logitclip fit` writes, in Chromium: docs/img/fit_page.png.

    python docs/screenshots.py

178 wines of scikit-learn, 36 of them with the name of another kind, as in the README. tests/test_docs.py fits the same.
"""

from __future__ import annotations

import base64
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_wine

DOCS = Path(__file__).parent
WIDTH, HEIGHT = 860, 520
ROWS = 14  # to be seen, with those of the matrix above


def write_wines(path: Path) -> list[int]:
    """Write the wines with wrong kinds, and return the positions of those."""
    wines: Any = load_wine(as_frame=True)
    frame = wines.frame
    kinds, true = np.array(["barolo", "grignolino", "barbera"]), frame.pop("target").to_numpy()
    wrong = np.random.default_rng(0).permutation(len(true))[:36]
    given = true.copy()
    given[wrong] = (true[wrong] + 1) % 3
    frame.assign(kind=kinds[given]).to_csv(path, index=False)
    return wrong.tolist()


def take(page: Path, out: Path) -> None:
    """Save the list of suspicious labels of a page as a picture, on a light screen."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", light)
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1.5, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page.resolve().as_uri())
        browser.execute_script("[...document.querySelectorAll('h2')].at(-1).scrollIntoView()")
        time.sleep(1)
        end = browser.execute_script(f"return document.querySelectorAll('tr')[{ROWS}].getBoundingClientRect().bottom")
        clip = {"x": 0, "y": browser.execute_script("return scrollY"), "width": WIDTH, "height": end, "scale": 1}
        picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})
        out.write_bytes(base64.b64decode(picture["data"]))
    finally:
        browser.quit()


def main() -> None:
    import logitclip as lc

    with tempfile.TemporaryDirectory() as folder:
        write_wines(Path(folder) / "wines.csv")
        lc.fit(Path(folder) / "wines.csv", "kind", out=Path(folder) / "model")
        take(Path(folder) / "model" / "page.html", DOCS / "img" / "fit_page.png")


if __name__ == "__main__":
    main()
