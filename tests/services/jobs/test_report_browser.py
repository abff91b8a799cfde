"""The report in a real browser: opened from disk, by keyboard, in the dark, on a narrow screen, and with
hostile texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.checks import PRESETS
from tests.support.browser import Browser, require_browser
from tests.support.report_kit import HOSTILE, open_desk

TEXTS = [*["a" * (10 + 7 * n % 60) for n in range(46)], HOSTILE, "[[fail:synth.nan]]", "b" * 450]
#: Lengths in the table of items, in the order of its rows.
LENGTHS = "[...document.querySelectorAll('tr[data-rank]')].map(row => row.querySelectorAll('td')[4].dataset.value).filter(Boolean).map(Number)"
SORTED_BY = "[...document.querySelectorAll('th[aria-sort]')].filter(th => th.ariaSort !== 'none').map(th => [th.innerText.trim(), th.ariaSort])"
#: Luminance contrast after WCAG 2.2 of every element that has text of its own, against the nearest opaque
#: ground.
CONTRASTS = """
(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.body.querySelectorAll("*")) {
    if (["SCRIPT", "STYLE", "AUDIO"].includes(element.tagName)) continue;
    if (![...element.childNodes].some(node => node.nodeType === 3 && node.data.trim())) continue;
    const style = getComputedStyle(element);
    const ink = parse(element.namespaceURI.endsWith("svg") ? style.fill : style.color);
    const [a, b] = [light(ink), light(ground(element))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push([element.tagName, element.className.baseVal ?? element.className, ratio.toFixed(2)]);
  }
  return low;
})()
"""


#: Whatever would have to be moved sideways to be read whole.
SIDEWAYS = """
[...document.querySelectorAll("html, body, body *")]
  .filter(e => e.scrollWidth > e.clientWidth + 1)
  .filter(e => e === document.documentElement || ["auto", "scroll"].includes(getComputedStyle(e).overflowX))
  .map(e => [e.tagName, e.className, e.scrollWidth, e.clientWidth])
"""
#: Cells and headings that stand outside the screen.
OUTSIDE = """
[...document.querySelectorAll("main *")].filter(e => e.getClientRects().length && !e.closest(".unseen, svg, audio"))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => [e.tagName, e.className, e.getBoundingClientRect().right])
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    browser = require_browser()
    assert browser
    with open_desk(tmp_path_factory.mktemp("report")) as desk:
        desk.report(desk.job(TEXTS, bad_lines=1), price_per_gpu_hour=3.0)
        return desk.rig.folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(require_browser()) as browser:
        yield browser


def complaints(browser: Browser) -> list[object]:
    kinds = {
        "Log.entryAdded",
        "Runtime.exceptionThrown",
        "Runtime.consoleAPICalled",
        "Page.javascriptDialogOpening",
    }
    return [event for event in browser.events if event[0] in kinds]


def test_it_opens_from_disk_without_a_complaint(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    length = browser.value(
        "new Promise(done => { const player = document.querySelector('audio'); player.preload = 'auto';"
        "player.onloadedmetadata = () => done(player.duration); player.onerror = () => done(player.error.message); player.load() })"
    )
    assert isinstance(length, float)
    assert length > 0
    assert browser.value("[...document.images].every(image => image.complete && image.naturalWidth > 1)")
    assert browser.value("window.hit") is None
    assert complaints(browser) == []
    asked = [
        parameters["request"]["url"]
        for method, parameters in browser.events
        if method == "Network.requestWillBeSent"
    ]
    assert all(url.startswith(("data:", page.parent.as_uri())) for url in asked), asked


@pytest.mark.parametrize(
    "attempt",
    [
        "new Image().src = 'http://127.0.0.1:9/x.png'",
        "fetch('http://127.0.0.1:9/').catch(() => 0)",
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.hit = 3'}))",
        "document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\">a</p>')",
        "document.body.append(Object.assign(document.createElement('iframe'), {src: 'http://127.0.0.1:9/'}))",
    ],
)
def test_its_policy_holds(browser: Browser, page: Path, attempt: str) -> None:
    browser.open(page.as_uri())
    refused = browser.value(
        "new Promise(done => { document.addEventListener('securitypolicyviolation', event => done(event.effectiveDirective));"
        f"setTimeout(() => done('allowed'), 120000); {attempt} }})"
    )
    assert refused != "allowed"
    assert browser.value("window.hit") is None


def test_it_is_used_by_keyboard(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    browser.press("Tab")
    assert browser.value("document.activeElement.className") == "skip"
    assert browser.value("document.activeElement.getBoundingClientRect().left >= 0"), (
        "the skip link is not seen when focused"
    )
    browser.press("Enter")
    assert browser.value("document.activeElement.id") == "items"
    for _ in range(20):
        browser.press("Tab")
        if browser.value("document.activeElement.innerText") == "Length":
            break
    assert browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert browser.value(SORTED_BY) == [["Worst", "ascending"]]
    lengths = browser.value(LENGTHS)
    assert lengths != sorted(lengths)
    browser.press("Enter")
    assert (browser.value(SORTED_BY), browser.value(LENGTHS)) == ([["Length", "ascending"]], sorted(lengths))
    assert (
        browser.value("document.getElementById('items-sorted').textContent") == "Sorted by Length, ascending."
    )
    browser.press("Space")
    assert (browser.value(SORTED_BY), browser.value(LENGTHS)) == (
        [["Length", "descending"]],
        sorted(lengths, reverse=True),
    )
    # An item without a length is last either way.
    assert browser.value("document.querySelector('tr[data-rank]:last-child').className") == "failed"
    assert browser.value("document.activeElement.innerText") == "Length"


def test_a_screen_reader_finds_names(browser: Browser, page: Path) -> None:
    browser.open(page.as_uri())
    nodes = [node for node in browser.call("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]
    named = {
        (node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if "role" in node
    }
    for role in ("image", "button", "table", "region", "columnheader", "rowheader", "heading"):
        names = [name for kind, name in named if kind == role]
        assert names, role
        assert role == "table" or all(name.strip() for name in names), role
    assert any(
        name.startswith("Throughput") and "items per second" in name
        for kind, name in named
        if kind == "image"
    )
    assert any(name.startswith("Waveform of item") for kind, name in named if kind == "image")


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (360, False)])
def test_it_can_be_read_in_any_light_and_width(page: Path, width: int, dark: bool, tmp_path: Path) -> None:
    with Browser(require_browser(), width=width, dark=dark) as browser:
        browser.open(page.as_uri())
        assert browser.value(CONTRASTS) == []
        # As a job of hours says it.
        browser.value(
            "document.querySelectorAll('figure td').forEach(cell => { cell.textContent = '123 min 45 s' })"
        )
        assert browser.value("document.documentElement.scrollWidth") <= width, (
            "the page is wider than the screen"
        )
        ground = browser.value(
            "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
        )
        assert (ground < 128) == dark
        browser.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.parametrize("width", [900, 1400])
def test_scores_behind_the_edge_are_reached_on_a_wide_screen(width: int, tmp_path: Path) -> None:
    with open_desk(tmp_path) as desk:
        desk.report(desk.job(TEXTS[:12], quality=PRESETS["basic"]))
    with Browser(require_browser(), width=width) as browser:
        browser.open((tmp_path / "report.html").as_uri())
        table = "document.querySelector('table[data-sortable]')"
        browser.value(f"{table}.parentElement.scrollIntoView()")
        # The bar that moves it is on the screen, however many rows there are.
        assert browser.value(f"{table}.parentElement.getBoundingClientRect().bottom <= innerHeight")
        browser.value(f"{table}.parentElement.scrollTo({table}.offsetWidth, 300)")
        for name, cell in (
            ("the last score", "thead th:last-child button"),
            ("the item of a row", "tbody tr:nth-child(4) th"),
        ):
            browser.value(
                f"window.cell = {table}.querySelector('{cell}'), window.at = cell.getBoundingClientRect()"
            )
            assert browser.value(
                "cell.contains(document.elementFromPoint(at.x + at.width / 2, at.y + at.height / 2))"
            ), name


@pytest.mark.parametrize("width", [320, 360, 600])
def test_nothing_has_to_be_moved_sideways_on_a_narrow_screen(page: Path, width: int) -> None:
    with Browser(require_browser(), width=width) as browser:
        browser.open(page.as_uri())
        browser.value("document.querySelectorAll('details').forEach(details => { details.open = true })")
        browser.value(
            "document.querySelectorAll('figure td').forEach(cell => { cell.textContent = '123 min 45 s' })"
        )
        assert browser.value(SIDEWAYS) == []
        assert browser.value(OUTSIDE) == []
        # Each cell says what it is, and the columns can still be sorted by.
        label = "getComputedStyle(document.querySelector('tr[data-rank] td.words'), '::before').content"
        assert browser.value(label) == '"Text"'
        browser.value(
            "[...document.querySelectorAll('th button')].find(button => button.innerText === 'Length').click()"
        )
        assert browser.value(LENGTHS) == sorted(browser.value(LENGTHS))
