"""`python -m docs.page`: take docs/images/page.png anew, of the demo's server under load.

Needs Debian's package `chromium`, and `pip install --group browser`.
"""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import trio
from examples import model_file
from examples.detector import model
from examples.detector.demo import MODEL, ROOT, WORKERS
from examples.detector.pictures import load_photographs, make_workload
from examples.detector.producing import stream_pictures
from examples.server_process import page_of, with_server
from PIL import Image
from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent / "images" / "page.png"
WIDTH, HEIGHT = 1280, 1100
LOOK_S = 70.0
"""Seconds under load before the picture: a little more than the page's last minute."""


async def main() -> None:
    """Serve, load, look, and write the picture."""
    model_file.ensure(MODEL, model, model.build)
    pictures = make_workload(load_photographs(), crops_per_size=30)
    log = ROOT / ".demo" / "page.log"

    async def use(address: str) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_load, address)
            await trio.to_thread.run_sync(_look, page_of(log))
            nursery.cancel_scope.cancel()

    async def _load(address: str) -> None:
        while True:
            await stream_pictures(address, pictures, lambda _: None)

    await with_server(ROOT / "configs" / "demo.yaml", "detector", workers=WORKERS, log=log, use=use)


def _look(page_address: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(page_address)
        page.wait_for_timeout(LOOK_S * 1000)
        page.locator("#slow .row-button").first.click()
        page.evaluate("scrollTo(0, 0)")  # a click scrolls to what it clicks
        shot = page.screenshot()
        browser.close()
    Image.open(io.BytesIO(shot)).convert("P", palette=Image.Palette.ADAPTIVE, colors=200).save(
        PICTURE, optimize=True
    )


if __name__ == "__main__":
    trio.run(main)
