"""The review page in a real browser: keys, mouse, narrow screens, undo, reload, two people, kills, hostile texts.

They need Chromium and its driver (on Debian, `apt-get install chromium chromium-driver`) and selenium, and are skipped
without them.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from reviews import SECRET, make_images, make_model, make_table, open_review, serving

from logitclip.own_data import load
from logitclip.own_data.answers import read_answers, read_answers_csv

for package in ("selenium", "starlette", "uvicorn"):
    pytest.importorskip(package)
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromium-driver")

PATIENCE = 200.0  # seconds, on a busy machine
SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Page:
    """A browser with a review page."""

    def __init__(self, profile: Path, width: int = 1200) -> None:
        from selenium.webdriver import Chrome, ChromeOptions
        from selenium.webdriver.chrome.service import Service

        options = ChromeOptions()
        options.binary_location = str(CHROMIUM)
        for switch in (*SWITCHES, f"--user-data-dir={profile}", f"--window-size={width},900"):
            options.add_argument(switch)
        options.add_experimental_option("prefs", {"download.default_directory": str(profile / "downloads")})
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = Chrome(options=options, service=Service(str(DRIVER)))
        self.driver.set_page_load_timeout(PATIENCE)

    def open(self, address: str) -> None:
        self.driver.get("about:blank")  # so that what is there is not the page before
        self.driver.get(address)
        self.wait(lambda: self.all(".example, .grid, #main .card") or self.text("#error"))

    def wait(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, self.text("body")
            time.sleep(0.05)

    def all(self, selector: str):
        return self.driver.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        return self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent).join('|')", selector
        )

    def run(self, script: str):
        return self.driver.execute_script(f"return {script}")

    @property
    def row(self) -> str:
        """The row on screen."""
        return self.run("items.length ? items[0].row : ''")

    def press(self, key: str) -> None:
        """Press a key as a person would: where the focus is."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(key).perform()

    def answer(self, key: str) -> str:
        """Press a key, wait for the next row, and return the one that was answered."""
        before, count = self.row, self.answered
        self.press(key)
        self.wait(lambda: self.answered == count + 1 and not self.run("busy"))
        return before

    @property
    def answered(self) -> int:
        found = re.match(r"\d+", self.text("#progress"))
        return int(found[0]) if found else -1

    def errors(self) -> list[str]:
        """What the console of the browser complains about."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(tmp_path_factory.mktemp("profile"))
    yield page
    page.driver.quit()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitted")
    make_model(make_table(folder, rows=150), folder / "model", label="kind")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    make_model(make_images(folder / "photos"), folder / "model")
    return folder


def copied(folder: Path, tmp_path: Path):
    return load(shutil.copytree(folder / "model", tmp_path / "model", ignore=shutil.ignore_patterns("runs")))


def said(model) -> list[tuple[str, str]]:
    return [(answer.row, answer.text) for answer in read_answers(model.folder / "answers.jsonl")]


def test_review_by_keys(browser: Page, fitted: Path, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    model = copied(fitted, tmp_path)
    review = open_review(model)
    with serving(review) as address:
        browser.open(f"{address}/?key={SECRET}")
        assert browser.driver.current_url == f"{address}/"  # the secret has left the address
        item = review.item(review.suspects[0])
        assert item["given"] in browser.text(".given")
        expected = [(browser.answer(Keys.ENTER), item["given"])]
        second = review.item(review.suspects[1])
        suggested = second["suggestions"][0][0]
        expected.append((browser.answer(str(1 + model.class_names.index(suggested))), suggested))
        expected.append((browser.answer("u"), "unsure"))
        expected.append((browser.answer("n"), "in no class"))
        browser.press("c")
        browser.press("OA")
        browser.wait(lambda: browser.text(".found li") == "oak")
        expected.append((browser.answer(Keys.ENTER), "oak"))
        browser.press("?")
        assert browser.all("#keys")[0].is_displayed()
        expected.append((browser.answer("k"), review.item(review.suspects[5])["given"]))
        assert said(model) == expected
        assert "6 answered" in browser.text("#progress")
        assert "of the last 4 suspects" in browser.text("#progress")
        assert browser.text("#status").startswith("Row ")
        assert browser.errors() == []


def test_review_by_mouse(browser: Page, fitted: Path, tmp_path: Path) -> None:
    model = copied(fitted, tmp_path)
    with serving(open_review(model)) as address:
        browser.open(f"{address}/?key={SECRET}")
        for number, name in enumerate(("keep", "Unsure", "Not in any class"), 1):
            button = next(b for b in browser.all(".choice") if name in b.get_attribute("class") + b.text)
            button.click()
            browser.wait(lambda number=number: browser.answered == number and not browser.run("busy"))
        found = browser.all(".find input")[0]
        found.click()
        found.send_keys("el")
        browser.all(".found li")[0].click()
        browser.wait(lambda: browser.answered == 4)
        browser.wait(lambda: not browser.run("busy"))
        browser.all("#undo")[0].click()
        browser.wait(lambda: browser.answered == 3)
    assert [text for _, text in said(model)][1:] == ["unsure", "in no class", "elm", "taken back"]


def test_undo_and_reload_in_the_middle(browser: Page, fitted: Path, tmp_path: Path) -> None:
    model = copied(fitted, tmp_path)
    with serving(open_review(model)) as address:
        browser.open(f"{address}/?key={SECRET}")
        rows = [browser.answer("1") for _ in range(3)]
        browser.press("z")
        browser.wait(lambda: browser.row == rows[2])
        browser.press("z")
        browser.wait(lambda: browser.row == rows[1])
        assert browser.answered == 1
        browser.open(f"{address}/")
        assert browser.answered == 1
        assert browser.row == rows[1]
        assert browser.answer("u") == rows[1]
    assert said(model)[-1] == (rows[1], "unsure")


def test_an_audit_shows_the_label_only_after_the_answer(browser: Page, fitted: Path, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    model = copied(fitted, tmp_path)
    review = open_review(model, 30)
    with serving(review) as address:
        browser.open(f"{address}/?key={SECRET}")
        while not browser.run("items[0].audit"):
            browser.answer("k")
        place = browser.run("items[0].id")
        assert browser.run("JSON.stringify(items[0])").count('"given":null') == 1
        assert browser.all(".given, .near, .keep, .bar") == []
        before = browser.answered
        browser.press(Keys.ENTER)  # nothing to keep
        browser.press("2")
        browser.wait(lambda: browser.answered == before + 1)
        assert model.class_names[review.given[place]] in browser.text("#last")
    last = read_answers(review.path)[-1]
    assert (last.audit, last.label) == (True, model.class_names[1])


def test_a_digit_means_the_same_class_in_every_row(browser: Page, fitted: Path, tmp_path: Path) -> None:
    """With more classes than digits it is the place of a suggestion, and nothing in an audit."""
    model = copied(fitted, tmp_path)
    keys = {name: str(i + 1) for i, name in enumerate(model.class_names)}
    shown = "[...document.querySelectorAll('.choice')].map((b) => [b.children[1].innerText, b.children[0].innerText])"
    with serving(open_review(model, 30)) as address:
        browser.open(f"{address}/?key={SECRET}")
        seen = set()
        while seen != {True, False}:
            audit, given = browser.run("items[0].audit"), browser.run("items[0].given")
            seen.add(audit)
            for name, key in browser.run(shown):
                assert name not in keys or key == keys[name]
                assert not name.startswith("Keep ") or key == f"Enter {keys[given]}"
            browser.answer("1")
        assert {answer.label for answer in read_answers(model.folder / "answers.jsonl")} == {model.class_names[0]}
        browser.run("about.classes.push(...'abcdefgh')")
        for audit, expected in (("false", ["1", "2"]), ("true", ["", ""])):
            browser.run(f"items[0].audit = {audit}")
            browser.run("items[0].suggestions = [['h', 0.5], ['a', 0.3]]")
            browser.run("render()")
            found = dict(browser.run(shown))
            assert [found["h"], found["a"]] == expected


@pytest.mark.parametrize("width", [400, 2560])
def test_narrow_and_wide_screens(browser: Page, fitted: Path, photos: Path, tmp_path: Path, width: int) -> None:
    """At every width nothing is cut off, and targets are large enough for a finger."""
    try:
        for number, folder in enumerate((fitted, photos)):
            model = copied(folder, tmp_path / str(number))
            with serving(open_review(model)) as address:
                browser.driver.execute_cdp_cmd(
                    "Emulation.setDeviceMetricsOverride",
                    {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
                )
                browser.open(f"{address}/?key={SECRET}")
                assert browser.run("innerWidth") == width
                assert browser.run("document.documentElement.scrollWidth") <= width
                boxes = browser.run(
                    "[...document.querySelectorAll('.choice, header button:not([hidden])')].map((b) => "
                    "[b.getBoundingClientRect().left, b.getBoundingClientRect().right, b.offsetHeight])"
                )
                assert all(left >= 0 and right <= width and height >= 40 for left, right, height in boxes), boxes
                button = browser.all(".choice")[1]
                button.click()
                browser.wait(lambda: browser.answered == 1)
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("width", [360, 420, 1200])
def test_the_page_of_fit_on_narrow_screens(browser: Page, fitted: Path, photos: Path, width: int) -> None:
    """Nothing of the suspicious labels is beyond the edge."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for folder in (fitted, photos):
            browser.driver.get((folder / "model" / "page.html").as_uri())
            shown, needed = browser.run("['clientWidth', 'scrollWidth'].map((what) => document.documentElement[what])")
            assert needed == shown <= width
            edges = browser.run(
                "[...document.querySelectorAll('.suspects *')].map((e) => e.getBoundingClientRect().right)"
            )
            assert len(edges) > 100
            assert max(edges) <= shown
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_two_people_at_once(browser: Page, fitted: Path, tmp_path: Path) -> None:
    model = copied(fitted, tmp_path)
    other = Page(tmp_path / "profile")
    try:
        with serving(open_review(model)) as address:
            for page, name in ((browser, "Ann"), (other, "Bob")):
                page.open(f"{address}/?key={SECRET}")
                page.run(f"document.getElementById('reviewer').value = '{name}'")
                page.run("document.getElementById('reviewer').dispatchEvent(new Event('change'))")
                page.wait(lambda page=page: not page.run("busy"))
            assert browser.row != other.row
            for _ in range(4):
                for page in (browser, other):
                    before = page.row
                    page.press("1")
                    page.wait(lambda page=page, before=before: page.row != before and not page.run("busy"))
            browser.press("z")  # takes back Ann's last answer, not Bob's
            browser.wait(lambda: "Taken back" in browser.text("#last"))
    finally:
        other.driver.quit()
    answers = read_answers(model.folder / "answers.jsonl")
    assert [a.reviewer for a in answers] == ["Ann", "Bob"] * 4 + ["Ann"]
    assert len({a.row for a in answers}) == 8
    assert answers[-1].row == answers[-3].row


def test_people_who_disagree_see_what_they_said(browser: Page, fitted: Path, tmp_path: Path) -> None:
    model = copied(fitted, tmp_path)
    review = open_review(model)
    first = review.suspects[0]
    hostile = "<b>Bob</b>"
    for who, label in (("Ann", "elm"), (hostile, "oak")):
        review.answer(first, review.rows.digest(first), "class", label, who)
    with serving(review) as address:
        browser.open(f"{address}/?key={SECRET}")
        browser.run("document.getElementById('reviewer').value = 'Ann'")
        browser.run("document.getElementById('reviewer').dispatchEvent(new Event('change'))")
        browser.wait(lambda: not browser.run("busy"))  # the page comes again, and what is typed before is lost
        browser.wait(lambda: browser.text(".said") == f"You disagree: Ann says elm, {hostile} says oak. Answer again.")
        browser.press("c")
        browser.press("oak")
        browser.press("\ue007")
        browser.wait(lambda: browser.text(".said") == "" and not browser.run("busy"))
        assert "disagree" not in browser.text("#progress")
        assert browser.errors() == []
    assert review.settled[review.rows.names[first]].label == "oak"


def test_the_grid(browser: Page, photos: Path, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    model = copied(photos, tmp_path)
    review = open_review(model)
    with serving(review) as address:
        browser.open(f"{address}/?key={SECRET}")
        browser.wait(lambda: browser.run("document.querySelector('.picture').naturalWidth") == 16)
        assert "<b onclick=alert(1)>" in browser.text("#main")  # the file name, as text
        assert browser.all("b") == []
        browser.press("g")
        browser.wait(lambda: len(browser.all(".tile")) == 24)
        first = browser.run("items[0].row")
        browser.press(Keys.ARROW_RIGHT)
        second = browser.run("items[current].row")
        browser.press("1")
        browser.wait(lambda: browser.answered == 1 and not browser.run("busy"))
        browser.press(Keys.ARROW_LEFT)
        browser.press(Keys.ARROW_LEFT)
        browser.press(Keys.ENTER)
        browser.wait(lambda: browser.answered == 2 and not browser.run("busy"))
        assert len(browser.all(".tile.done")) == 2
        assert [row for row, _ in said(model)] == [second, first]
        browser.press("z")
        browser.wait(lambda: browser.answered == 1)
        assert browser.run("items[current].row") == first
        for _ in range(23):  # the rest of the first page: then comes the second
            count = browser.answered
            browser.press("k")
            browser.wait(lambda count=count: browser.answered == count + 1 and not browser.run("busy"))
        browser.wait(lambda: len(browser.all(".tile")) == 12)
        assert browser.errors() == []


def test_the_grid_by_mouse(browser: Page, photos: Path, tmp_path: Path) -> None:
    """Everything that a key does has a button, in the tiles of an audit too, and a digit only does what is shown."""
    model = copied(photos, tmp_path)
    with serving(open_review(model, 12)) as address:
        browser.open(f"{address}/?key={SECRET}")
        browser.press("g")
        browser.wait(lambda: len(browser.all(".tile")) == 24)
        blind = browser.run("items.findIndex((item) => item.audit)")
        open_ = browser.run("items.findIndex((item) => !item.audit)")
        for place, name in ((blind, "Unsure"), (open_, "None"), (blind, "light")):
            row, count = browser.run(f"items[{place}].row"), browser.answered
            buttons = browser.driver.find_elements("css selector", f".tile:nth-child({place + 1}) button")
            next(one for one in buttons if name in one.text).click()
            browser.wait(lambda count=count: browser.answered == count + 1 and not browser.run("busy"))
            browser.press("z")
            browser.wait(lambda count=count: browser.answered == count and not browser.run("busy"))
            assert browser.run("items[current].row") == row
            browser.run("run(load)")  # the rows in their order again
            browser.wait(lambda: not browser.run("busy") and len(browser.all(".tile")) == 24)
        assert [text for _, text in said(model)][::2] == ["unsure", "in no class", "light"]
        place = browser.run("items.findIndex((item) => !item.audit)")
        browser.run(f"(items[{place}].suggestions = [['dark', 0.5], ['light', 0.3], ['dark', 0.2]], current = {place})")
        browser.run("render()")
        browser.press("3")  # only two suggestions are shown
        assert not browser.run("busy")
        assert browser.answered == 0
        assert len(said(model)) == 6
        assert browser.errors() == []


def test_hostile_texts_stay_texts(browser: Page, fitted: Path, tmp_path: Path) -> None:
    model = copied(fitted, tmp_path)
    with serving(open_review(model)) as address:
        browser.open(f"{address}/?key={SECRET}")
        for _ in range(4):
            browser.answer("1")
        assert "onerror" in browser.text("#main")
        assert browser.all("#main img") == []
        assert browser.run("document.scripts.length") == 2
        assert browser.run("document.title").startswith("Review ")
        assert browser.errors() == []


def test_another_origin_and_a_browser_without_the_secret_get_nothing(browser, fitted: Path, tmp_path: Path) -> None:
    model = copied(fitted, tmp_path)
    with serving(open_review(model)) as address:
        browser.driver.get(f"{address}/")  # only cookies of the page's own host are deleted
        browser.driver.delete_all_cookies()
        browser.driver.get(f"{address}/")
        assert "has the secret" in browser.text("body")
        browser.open(f"{address}/?key={SECRET}")
        browser.driver.get("data:text/html,<title>evil</title>")
        sent = (
            f"fetch('{address}/answer', {{method: 'POST', mode: 'no-cors', credentials: 'include', body: "
            "JSON.stringify({id: 0, kind: 'unsure'})}).then(() => 'sent', () => 'failed')"
        )
        browser.driver.execute_async_script(f"const done = arguments[0]; ({sent}).then(done)")
        browser.driver.get("about:blank")
        browser.driver.get_log("browser")
    assert said(model) == []


def test_the_server_is_killed_in_the_middle_of_a_hundred_answers(browser: Page, fitted: Path, tmp_path: Path) -> None:
    model = copied(fitted, tmp_path)
    rows: list[str] = []
    for stop in (40, 75, 100):
        command = [sys.executable, "-m", "logitclip", "review", str(model.folder), "--no-browser"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            address = ""
            while not address:
                line = process.stderr.readline()
                assert line, "the server has ended"
                address = "".join(re.findall(r"http://\S+", line))
            browser.open(address)
            assert browser.answered == len(rows)
            while len(rows) < stop:
                rows.append(browser.answer("1"))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        assert [row for row, _ in said(model)] == rows
        browser.press("1")
        browser.wait(lambda: "cannot be reached" in browser.text("#error"))
    assert len(set(rows)) == 100
    browser.driver.get("about:blank")
    browser.driver.get_log("browser")


def test_the_file_without_a_server(browser: Page, photos: Path, fitted: Path, tmp_path: Path) -> None:
    for number, folder in enumerate((fitted, photos)):
        model = copied(folder, tmp_path / str(number))
        review = open_review(model, 12)
        review.write_page(tmp_path / f"review{number}.html")
        page = (tmp_path / f"review{number}.html").as_uri()
        browser.open(page)
        assert f"{review.state()['left']} suspects left" in browser.text("#progress")  # as the server counts them
        expected = []
        for _ in range(8):
            audit, given = browser.run("items[0].audit"), browser.run("items[0].given")
            name = browser.run("(items[0].hidden || items[0]).row")
            browser.answer("2" if audit else "k")
            expected.append((name, model.class_names[1] if audit else given))
        if folder is photos:
            assert browser.run("document.querySelector('.picture').naturalWidth") == 16
        browser.press("z")
        browser.wait(lambda: browser.answered == 7)
        assert browser.run("file.answers.length > file.saved")  # leaving the page would warn
        downloads = tmp_path / f"downloads{number}"
        browser.driver.execute_cdp_cmd(
            "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(downloads)}
        )
        browser.all("#download")[0].click()
        browser.wait(lambda downloads=downloads: (downloads / "answers.csv").exists())
        browser.wait(lambda downloads=downloads: (downloads / "answers.csv").stat().st_size > 0)
        assert not browser.run("file.answers.length > file.saved")
        browser.open(page)  # the answers are still there
        assert browser.answered == 7
        answers = read_answers_csv(downloads / "answers.csv")
        assert [(answer.row, answer.text) for answer in answers] == expected[:7]
        with (downloads / "answers.csv").open(newline="", encoding="utf-8") as file:
            assert not any(cell.startswith(("=", "+", "@")) for row in csv.reader(file) for cell in row)
        assert browser.errors() == []
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "logitclip",
                "review",
                model.folder,
                "--answers",
                downloads / "answers.csv",
                "--json",
            ],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert "7 of 7 answers are new" in done.stderr
        assert json.loads(done.stdout)["answered"] == 7


def test_light_and_dark_have_enough_contrast(browser: Page, fitted: Path, tmp_path: Path) -> None:
    model = copied(fitted, tmp_path)
    with serving(open_review(model)) as address:
        for scheme in ("light", "dark"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            browser.open(f"{address}/?key={SECRET}")
            for selector in ("body", ".given", ".choice.keep", "#progress", ".choice .chance"):
                text, back = colours(browser, selector)
                assert contrast(text, back) >= 4.5, (scheme, selector, text, back)
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def colours(page: Page, selector: str) -> tuple[list[float], list[float]]:
    """Return the colour of a text and of what is behind it."""
    script = """
        let element = document.querySelector(arguments[0]);
        const text = getComputedStyle(element).color;
        const behind = () => getComputedStyle(element).backgroundColor;
        while (behind() === "rgba(0, 0, 0, 0)") element = element.parentElement;
        return [text, behind()];
    """
    text, back = page.driver.execute_script(script, selector)
    return [float(n) for n in re.findall(r"[\d.]+", text)[:3]], [float(n) for n in re.findall(r"[\d.]+", back)[:3]]


def contrast(one: list[float], two: list[float]) -> float:
    """Return the contrast ratio of WCAG 2."""

    def luminance(colour: list[float]) -> float:
        parts = [c / 255 for c in colour]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)
