"""Small data sets with models and reviews of them, for the tests of the review page and its server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from logitclip.own_data import fit
from logitclip.own_data.fitted_rows import FittedRows
from logitclip.own_data.review import Review
from logitclip.own_data.server import make_server

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"
BREAKING = "</script><script>document.title='owned'</script><!-- @@NONCE@@ \u2028"
SECRET = "a-secret"


def make_table(folder: Path, rows: int = 120, seed: int = 0) -> Path:
    """Write a table of three classes, a tenth of them wrong, with texts that try to become markup."""
    import pandas as pd

    rng = np.random.default_rng(seed)
    true = np.arange(rows) % 3
    names = np.array(["elm", "oak", HOSTILE])
    given = np.where(rng.random(rows) < 0.1, (true + 1) % 3, true)
    frame = pd.DataFrame({"x": 4.0 * true + rng.normal(0, 0.6, rows), "z": rng.normal(size=rows)})
    frame["note"] = [HOSTILE if i % 2 else BREAKING for i in range(rows)]
    frame["kind"], frame["true"] = names[given], names[true]
    frame.drop(columns="true").to_csv(folder / "table.csv", index=False)
    frame.to_csv(folder / "with_truth.csv", index=False)
    return folder / "table.csv"


def make_images(folder: Path, count: int = 36) -> Path:
    """Write dark and bright pictures into two class folders, some in the wrong one, with names that are markup."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(count):
        pixels = rng.integers(0, 90, (16, 16, 3)) + (150 if i % 2 else 0)
        kind = ["dark", "light"][(i + (i % 9 == 0)) % 2]
        (folder / kind).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / kind / f"{i} <b onclick=alert(1)>&quot;'.png")
    return folder


def make_model(data: Path, out: Path, **options):
    """Fit quickly, with out-of-fold predictions."""
    return fit(data, out=out, clip="norm:temp=2", epochs=3, find_issues=True, **options)


@contextlib.contextmanager
def serving(review: Review) -> Iterator[str]:
    """Serve a review in a thread, and yield its address without the secret."""
    listener = socket.create_server(("127.0.0.1", 0))  # not the usual port, on which another test may have a server
    server = make_server(review, listener, SECRET)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


def open_review(model, audit: int = 0) -> Review:
    return Review(model, FittedRows(model), audit)
