"""The page in a real Chromium, beside a real server under load: `make test-tools`, with Debian's package `chromium`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from tests.e2e.admin import port_of
from tests.e2e.conftest import PATIENCE_S, Served, Workplace, temporary_workplace
from tests.secret_files import write_secret

from shapestream.errors import ModelError, RequestError

THEMES, WIDTHS = ("light", "dark"), (1440, 390)
# Padding is allowed, so that there is some; calls take long enough for a queue.
CONFIG = """\
    server: SERVER
    models:
      - name: pictures
        function: gated:double_slowly
        inputs: {x: {shape: "batch:1..4, height:1..64, width:1..64", element_type: f32, pad: {height: 0, width: 0}}}
        outputs: {y: {shape: "batch, height, width", element_type: f32, rule: rows}}
        trust: true
        calibration_s: 0
    workers: [{count: 2, models: [pictures], slots: 1}]
"""
OPEN = "{listen: [ipc://s.sock], admin: 127.0.0.1:0}"
WITH_TOKEN = "{listen: [ipc://s.sock], admin: {address: 127.0.0.1:0, token_file: token}}"


def chromium() -> str:
    """The path of Debian's browser."""
    path = shutil.which("chromium")
    if path is None:
        pytest.exit("tests/tools/page.py needs chromium (Debian: apt-get install chromium)", 1)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for all tests."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser
        browser.close()


class Load:
    """Threads that send requests of many sizes to a server, one of fifty with an error, until `stop`."""

    def __init__(self, served: Served, models: Sequence[str] = ("pictures",)) -> None:
        self._models = models
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._send, args=(served, number), daemon=True) for number in range(12)
        ]
        for thread in self._threads:
            thread.start()

    def _send(self, served: Served, number: int) -> None:
        random = np.random.default_rng(number)
        with served.client() as client:
            while not self._stopped.is_set():
                x = np.ones((1, *random.integers(1, 64, 2)), np.float32)
                if random.random() < 0.02:
                    x[:] = 14
                try:
                    client.infer(self._models[number % len(self._models)], {"x": x})
                except ModelError:
                    pass
                except RequestError:
                    return

    def stop(self) -> None:
        """Send no more."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server under load."""
    for place in temporary_workplace(tmp_path_factory):
        served = place.serve(CONFIG.replace("SERVER", OPEN))
        load = Load(served)
        yield served
        load.stop()


@pytest.fixture
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workplace]:
    """A folder to serve from."""
    yield from temporary_workplace(tmp_path_factory)


Open = Callable[..., Page]
expect.set_options(timeout=PATIENCE_S * 1000)


@pytest.fixture
def look(browser: Browser) -> Iterator[Open]:
    """Opens the page of a server; no page may log an error, or ask another server for anything."""
    complaints: list[str] = []
    contexts = []

    def open_page(port: int, theme: str = "light", width: int = 1440) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)  # type: ignore[arg-type]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_S * 1000)
        url = f"http://127.0.0.1:{port}"
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith((f"{url}/", "data:")) else complaints.append(request.url)
            ),
        )
        page.goto(url)
        return page

    open_page.complaints = complaints  # type: ignore[attr-defined]
    yield open_page
    for context in contexts:
        context.close()
    assert [] == complaints


def expect_live(page: Page) -> None:
    """The page has data."""
    expect(page.locator("#state")).to_have_text("live", timeout=PATIENCE_S * 1000)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_all_panels_are_filled(look: Open, loaded: Served, theme: str, width: int) -> None:
    """In both themes and widths, without a scroll bar across."""
    page = look(port_of(loaded), theme, width)
    expect_live(page)
    patience = {"timeout": PATIENCE_S * 1000}
    expect(page.locator("#slots tr")).to_have_count(2, **patience)
    expect(page.locator("#slots")).to_contain_text("running", **patience)
    expect(page.locator("#queue table td.hot").first).to_be_visible(**patience)
    expect(page.locator("#queue-note")).to_contain_text("by height and width", **patience)
    expect(page.locator("#errors")).to_contain_text("fourteen is not to my liking", **patience)
    expect(page.locator("#reasons")).to_contain_text("model_error", **patience)
    # Within the first minute both are the same number.
    expect(page.locator("#reasons td").nth(1)).not_to_have_text("0", **patience)
    expect(page.locator("#slow .row-button").first).to_be_visible(**patience)
    for chart in ("#rate", "#latency"):
        page.wait_for_function(
            "chart => document.querySelector(chart + ' .curve')?.getAttribute('d').length > 40", arg=chart
        )
    for kind in ("solid c-useful", "c-padding"):
        page.wait_for_function(
            "kind => document.querySelector(`#timeline path[class='${kind}']`)?.getAttribute('d')", arg=kind
        )
    expect(page.locator("#tiles > div")).to_have_count(8)
    assert [] == [
        text for text in page.locator("dd > span:first-child").all_inner_texts() if text in ("", "\u2013")
    ]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (theme == "dark") == (sum(map(int, back.strip("rgb()").split(","))) < 3 * 128)


def test_the_keyboard_reaches_everything(look: Open, loaded: Served) -> None:
    """In the order of the page, with a visible mark; charts and batches answer to arrows; a story opens by Enter."""
    page = look(port_of(loaded))
    expect_live(page)
    expect(page.locator("#slow .row-button").first).to_be_visible()
    reached: list[str] = []
    for _ in range(12):
        page.keyboard.press("Tab")
        what, mark = page.evaluate(
            "(at => [at.id || at.className, getComputedStyle(at).outlineStyle])(document.activeElement)"
        )
        reached.append(what)
        assert "solid" == mark
        if what == "timeline":
            page.keyboard.press("ArrowLeft")
            expect(page.locator("#batch")).to_contain_text("request")
        if what == "rate":
            page.keyboard.press("Home")
            expect(page.locator("#rate-key")).to_contain_text("ago")
        if what == "row-button":
            break
    assert [
        "theme", "rate", "latency", "timeline", "by-worker", "scroll low", "scroll", "row-button"
    ] == reached  # fmt: skip
    page.keyboard.press("Enter")
    story = page.locator(".story:visible")
    expect(story).to_have_count(1)
    expect(story.locator("li").nth(1)).to_contain_text("ms")
    page.wait_for_timeout(2500)  # readings come; the story stays open, and the button keeps the focus
    expect(story).to_have_count(1)
    assert "row-button" == page.evaluate("document.activeElement.className")


def test_the_theme_can_be_chosen_and_is_remembered(look: Open, loaded: Served) -> None:
    """Whatever the system's is."""
    page = look(port_of(loaded), "light")
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    for name in ("Theme: light", "Theme: dark"):
        page.locator("#theme").click()
        expect(page.locator("#theme")).to_have_text(name)
    dark = page.evaluate(back)
    assert dark != light
    page.reload()
    assert dark == page.evaluate(back)


def test_a_page_without_requests_says_how_to_send_one(workplace: Workplace, look: Open) -> None:
    """Then the server ends, which is shown plainly, and comes back, which is found."""
    served = workplace.serve(CONFIG.replace("SERVER", OPEN))
    port = port_of(served)
    page = look(port)
    expect(page.locator("#start")).to_contain_text(f"shapestream infer {served.address} pictures")
    served.kill()
    expect(page.locator("#gone")).to_contain_text("No live data")
    expect(page.locator("#state")).to_have_text("lost")
    again = workplace.serve(CONFIG.replace("SERVER", OPEN.replace("127.0.0.1:0", f"127.0.0.1:{port}")))
    expect_live(page)
    expect(page.locator("#gone")).to_be_hidden()
    with again.client() as client:
        client.infer("pictures", {"x": np.ones((1, 3, 3), np.float32)})
    expect(page.locator("#start")).to_be_hidden()
    assert all("net::ERR" in complaint for complaint in look.complaints)  # type: ignore[attr-defined]
    look.complaints.clear()  # type: ignore[attr-defined]


def test_the_token_is_asked_for(workplace: Workplace, look: Open) -> None:
    """A wrong one is refused; the right one is kept for this tab."""
    write_secret(workplace.folder / "token", "secret-word\n")
    page = look(port_of(workplace.serve(CONFIG.replace("SERVER", WITH_TOKEN))))
    for word in ("wrong", "secret-word"):
        page.locator("#token").fill(word)
        page.keyboard.press("Enter")
        if word == "wrong":
            expect(page.locator("#refused")).to_contain_text("does not accept")
    expect_live(page)
    expect(page.locator("#locked")).to_be_hidden()
    page.reload()
    expect_live(page)
    assert "secret-word" not in page.content()
    assert all("401" in complaint for complaint in look.complaints)  # type: ignore[attr-defined]
    look.complaints.clear()  # type: ignore[attr-defined]


def test_a_dead_worker_stays_on_the_page(workplace: Workplace, look: Open) -> None:
    """Missing, since when and how it ended; the note above the slots counts it."""
    served = workplace.serve(CONFIG.replace("SERVER", OPEN))
    served.wait_for("workers ready")
    page = look(port_of(served), width=390)
    expect(page.locator("#slots-note")).to_have_text("2 of 2 configured workers, 2 slots")
    rows = page.locator("#workers tr")
    expect(rows.nth(1)).to_contain_text("w1 serves for")
    os.kill(served.workers()["w1"], signal.SIGKILL)
    expect(rows.nth(1)).to_contain_text("SIGKILL, ")
    expect(rows.nth(1)).to_contain_text("w1 serves for")
    served.config.write_text("models: 3")
    os.kill(served.workers()["w1"], signal.SIGKILL)
    expect(rows.nth(1)).to_contain_text("w1 given up for")
    expect(rows.nth(1)).to_contain_text("status 3, ")
    expect(rows.nth(1)).to_contain_text("configuration")
    expect(rows.nth(0)).to_contain_text("w0 serves for")
    expect(page.locator("#slots-note")).to_have_text("1 of 2 configured workers, 1 slot")
    expect(page.locator("#notices")).to_contain_text("worker w1 of entry 0 is given up")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


CHAINED = """\
    chains:
      - name: twice
        inputs: {x: first.x}
        stages:
          - {name: first, model: pictures, inputs: {x: x}}
          - {name: second, model: pictures, inputs: {x: first.y}}
        outputs: {y: second.y}
"""


@pytest.mark.parametrize("width", WIDTHS)
def test_a_chain_has_a_row_for_each_stage(workplace: Workplace, look: Open, width: int) -> None:
    """Its model, requests, time and what runs; a chain among the slowest requests tells its stages."""
    served = workplace.serve(CONFIG.replace("SERVER", OPEN) + CHAINED)
    load = Load(served, ["twice"])
    page = look(port_of(served), width=width)
    expect_live(page)
    rows = page.locator("#chains tr")
    expect(rows).to_have_count(3)
    assert ["twice", "first: pictures", "second: pictures"] == rows.locator(
        "td:first-child"
    ).all_text_contents()
    for row in range(3):
        expect(rows.nth(row).locator("td").nth(1)).to_have_text(re.compile(r"^[0-9.,]+$"))
        expect(rows.nth(row).locator("td").nth(2)).to_have_text(re.compile(r"^[0-9.]+ (ms|s)$"))
    expect(page.locator("#slow")).to_contain_text(re.compile(r"first [0-9.]+ (ms|s), second [0-9.]+ (ms|s)"))
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    load.stop()


MANY = 30
NONE = "\u2013"


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with thirty models, under load for five of them; one has a queue."""
    head, rest = CONFIG.replace("SERVER", OPEN).split("      - name")
    model, _ = rest.split("    workers")
    models = "".join(
        f"      - name{model}".replace("pictures\n", f"pictures-of-{number:02}\n") for number in range(MANY)
    )
    for place in temporary_workplace(tmp_path_factory):
        served = place.serve(f"{head}{models}    workers: [{{count: 2, slots: 1}}]\n")
        load = Load(served, [f"pictures-of-{number:02}" for number in range(5)])
        yield served
        load.stop()


@pytest.mark.parametrize("width", WIDTHS)
def test_thirty_models_can_be_read(look: Open, many: Served, width: int) -> None:
    """One row each with rate, 99 %, queue, padding and errors; bars name their model; a click shows one alone."""
    page = look(port_of(many), width=width)
    expect_live(page)
    rows = page.locator("#models tr")
    expect(rows).to_have_count(MANY)
    busy, idle = rows.nth(0).locator("td"), rows.nth(MANY - 1).locator("td")
    expect(busy.nth(0)).to_have_text("pictures-of-00")
    expect(busy.nth(1)).to_have_text(re.compile(r"^[0-9.]+$"))
    expect(busy.nth(2)).to_have_text(re.compile(r"^[0-9.]+ (ms|s)$"))
    expect(busy.nth(3)).to_have_text(re.compile(r"^[0-9]+$"))
    expect(busy.nth(5)).to_have_text(re.compile(r"^[0-9.]+ %$"))
    expect(busy.nth(6)).to_have_text(re.compile(r"^[1-9][0-9]*$"))
    assert ["pictures-of-29", "0", NONE, "0", NONE, NONE, "0"] == idle.all_text_contents()
    expect(page.locator("#timeline .name").first).to_have_text(re.compile(r"^p.*0?[0-4]$"))
    # Nothing is cut off, and no number touches its neighbour.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    cut = """[...document.querySelectorAll('#models td, .models th')].filter((cell) => cell.offsetParent &&
        cell.scrollWidth > cell.clientWidth).map((cell) => cell.textContent)"""
    assert [] == page.evaluate(cut)
    assert page.evaluate("document.querySelector('#models tr').offsetHeight") <= 34
    rows.nth(3).locator("button").click()
    expect(page.locator("#model")).to_have_value("pictures-of-03")
    expect(rows).to_have_count(MANY)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_the_age_of_what_is_shown_counts_from_the_last_word(
    workplace: Workplace, look: Open, number: int
) -> None:
    """While the server stands still, or is gone, the page says for how long, however often it tries again."""
    served = workplace.serve(CONFIG.replace("SERVER", OPEN))
    page = look(port_of(served))
    expect_live(page)
    served.send(number)
    stopped = time.monotonic()
    expect(page.locator("#gone")).to_contain_text("No live data")
    for patience_s in (12, 25):  # beyond several new tries
        page.wait_for_timeout(max(0.0, stopped + patience_s - time.monotonic()) * 1000)
        since = time.monotonic() - stopped
        (told,) = re.findall(r"([0-9]+) s", page.locator("#gone").inner_text())
        assert abs(since - int(told)) <= 3
    served.send(signal.SIGCONT)
    if number == signal.SIGSTOP:
        expect_live(page)
    assert all("net::ERR" in complaint for complaint in look.complaints)  # type: ignore[attr-defined]
    look.complaints.clear()  # type: ignore[attr-defined]


HOSTILE = "<img src=x onerror=document.title='owned'><b>bold</b>"


def test_what_peers_wrote_is_shown_as_text(workplace: Workplace, look: Open) -> None:
    """A request's own id, a slow request's story, and whatever else may come: tags stay text."""
    served = workplace.serve(CONFIG.replace("SERVER", OPEN))
    with served.client() as client:
        with pytest.raises(ModelError):
            client.infer("pictures", {"x": np.full((1, 3, 3), 14, np.float32)}, request_id=HOSTILE)
    page = look(port_of(served))
    expect(page.locator("#errors .id")).to_have_text(HOSTILE)
    page.locator("#slow .row-button").first.click()
    expect(page.locator("#slow .story b")).to_have_text(HOSTILE)
    assert 0 == page.locator("main img").count()
    assert "shapestream" == page.title()
