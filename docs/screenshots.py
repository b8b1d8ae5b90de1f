"""Takes the pictures of the pages that people see, in Chromium: fit_page.png, review_page.png and review_grid.png, each
also on a phone and in the dark.

    python docs/screenshots.py

The page of `logitclip fit` for 178 wines of scikit-learn, 36 of them with the name of another kind, as in the README
(tests/test_docs.py fits the same); and the page of `logitclip review` for 600 handwritten digits, a tenth of them in
the wrong folder, one by one and as a grid. All are as wide as a page shows them without shrinking their text.
"""

from __future__ import annotations

import base64
import contextlib
import io
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits, load_wine

IMAGES = Path(__file__).parent / "img"
WIDTHS = {"fit": 860, "phone": 388, "review": 736}  # in pixels: a page shows them at 736, a phone at 388
HEIGHT = 620
SCHEMES = {"light": "", "dark": "_dark"}  # at the end of the file name
ROWS = 10  # suspicious labels to be seen on the page of fit
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


KINDS = np.array(["barolo", "grignolino", "barbera"])


def write_wines(path: Path) -> list[int]:
    """Write the wines with wrong kinds, and return the positions of those."""
    wines: Any = load_wine(as_frame=True)
    frame = wines.frame
    true = frame.pop("target").to_numpy()
    wrong = np.random.default_rng(0).permutation(len(true))[:36]
    given = true.copy()
    given[wrong] = (true[wrong] + 1) % 3
    frame.assign(kind=KINDS[given]).to_csv(path, index=False)
    return wrong.tolist()


def true_kinds() -> list[str]:
    """The right kinds of the wines."""
    wines: Any = load_wine()
    return KINDS[wines.target].tolist()


def write_digits(folder: Path) -> None:
    """Write 600 digits as pictures, a folder for each class, every tenth in the next one."""
    from PIL import Image

    digits: Any = load_digits()
    for i, (pixels, label) in enumerate(zip(digits.images[:600], digits.target[:600], strict=True)):
        kind = folder / NAMES[(label + (i % 10 == 0)) % 10]
        kind.mkdir(parents=True, exist_ok=True)
        wide = np.pad(255 - 15.9 * pixels, ((1, 1), (8, 8)), constant_values=255).astype(np.uint8)  # so it is not high
        Image.fromarray(wide).resize((240, 100), Image.Resampling.BICUBIC).save(kind / f"{i:04}.png")


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))
    try:
        yield browser
    finally:
        browser.quit()


def set_screen(browser: Any, width: int, height: int, scheme: str) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1.5, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", features)


def take(browser: Any, name: str, height: float) -> None:
    """Save what the browser shows, from the top down to `height`, with few colours."""
    from PIL import Image

    time.sleep(1.5)  # pictures are loaded
    width, top = browser.execute_script("return [innerWidth, scrollY]")
    clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
    picture = base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip})["data"])
    few = Image.open(io.BytesIO(picture)).convert("P", palette=Image.Palette.ADAPTIVE, colors=64)
    few.save(IMAGES / name, optimize=True)


def take_fit(browser: Any, page: Path) -> None:
    for screen, rows, middle in (("fit", ROWS, ""), ("phone", ROWS - 5, "_narrow")):
        for scheme, end in SCHEMES.items():
            set_screen(browser, WIDTHS[screen], 2 * HEIGHT, scheme)
            browser.get(page.resolve().as_uri())
            browser.execute_script("[...document.querySelectorAll('h2')].at(-1).scrollIntoView()")
            script = f"return document.querySelectorAll('.suspects tr')[{rows}].getBoundingClientRect().bottom"
            take(browser, f"fit_page{middle}{end}.png", browser.execute_script(script))


def take_review(browser: Any, model: Any) -> None:
    from logitclip.own_data.fitted_rows import FittedRows
    from logitclip.own_data.review import Review
    from logitclip.own_data.server import make_server, open_socket

    listener, secret = open_socket(), "a-secret"
    server = make_server(Review(model, FittedRows(model), 40), listener, secret)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        for screen, middle in (("review", ""), ("phone", "_narrow")):
            for scheme, end in SCHEMES.items():
                set_screen(browser, WIDTHS[screen], 760, scheme)
                browser.get(f"http://127.0.0.1:{listener.getsockname()[1]}/?key={secret}")
                take(browser, f"review_page{middle}{end}.png", 760)
                set_screen(browser, WIDTHS[screen], HEIGHT, scheme)
                browser.find_element("tag name", "body").send_keys("g")
                take(browser, f"review_grid{middle}{end}.png", HEIGHT)
    finally:
        server.should_exit = True
        thread.join(60)


def main() -> None:
    import logitclip as lc

    with tempfile.TemporaryDirectory() as name, open_browser() as browser:
        folder = Path(name)
        write_wines(folder / "wines.csv")
        lc.fit(folder / "wines.csv", "kind", out=folder / "wines")
        take_fit(browser, folder / "wines" / "page.html")
        write_digits(folder / "digits")
        model = lc.fit(folder / "digits", out=folder / "model", learner="forest,logistic,neighbours")
        take_review(browser, model)


if __name__ == "__main__":
    main()
