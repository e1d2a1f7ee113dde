"""`python -m docs.page`: take docs/images/page.png anew, of a server with two models at half of what it can do.

Needs Debian's package `chromium`, and `pip install --group browser`.
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import trio
from examples import model_file
from examples.detector import model as detector
from examples.detector.pictures import load_photographs, make_workload
from examples.embeddings import model as minilm
from examples.embeddings.weights import load_weights, model_folder
from examples.server_process import page_of, with_server
from PIL import Image
from playwright.sync_api import sync_playwright

import shapestream

ROOT = Path(__file__).parents[1]
PICTURE = Path(__file__).parent / "images" / "page.png"
WIDTH, HEIGHT = 1280, 1100
LOOK_S = 75.0
"""Seconds under load before the picture: a little more than the page's last minute."""
PICTURES_PER_S, TEXTS_PER_S, AT_ONCE = 6.0, 25.0, 4
"""Rates of requests, which come by Poisson in groups of so many."""
YAML = """\
server: {listen: ["ipc://run/page.sock"], admin: "127.0.0.1:0"}
models:
  - name: detector
    path: ../.cache/detector.xml
    inputs: {image: {shape: "batch:1..16, 1, height:16..1024, width:16..1024"}}
    outputs: {peaks: {rule: index_column, column: 0}, scores: {rule: with, output: peaks}}
    batching: {max_batch: 16}
    probe: {image: {integers: [0, 255]}}
  - name: embeddings
    path: ../.cache/minilm.xml
    inputs:
      input_ids: {shape: "batch:1..64, seq:1..512", pad: {seq: 0}}
      attention_mask: {shape: "batch, seq", pad: {seq: 0}, mask_of: input_ids}
    outputs: {embedding: {rule: rows}}
    probe: {input_ids: {integers: [0, 30521]}}
workers: [{count: 2, models: [detector, embeddings], slots: 1, threads: 1}]
logging: {level: info, format: json}
"""


async def main() -> None:
    """Serve, load, look, and write the picture."""
    model_file.ensure(ROOT / ".cache" / "detector.xml", detector, detector.build)
    model_file.ensure(
        ROOT / ".cache" / "minilm.xml", minilm, lambda: minilm.build(load_weights(model_folder()))
    )
    config, log = ROOT / ".demo" / "page.yaml", ROOT / ".demo" / "page.log"
    config.parent.mkdir(exist_ok=True)
    config.write_text(YAML)

    async def use(address: str) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_load, address, "detector", PICTURES_PER_S, _pictures())
            nursery.start_soon(_load, address, "embeddings", TEXTS_PER_S, _texts())
            await trio.to_thread.run_sync(_look, page_of(log))
            nursery.cancel_scope.cancel()

    await with_server(config, "embeddings", workers=2, log=log, use=use)


def _pictures() -> Callable[[np.random.Generator], dict[str, Any]]:
    pictures = make_workload(load_photographs(), crops_per_size=30)
    return lambda rng: {"image": pictures[rng.integers(len(pictures))].image}


def _texts() -> Callable[[np.random.Generator], dict[str, Any]]:
    def draw(rng: np.random.Generator) -> dict[str, Any]:
        length = int(np.clip(24 * np.exp(0.9 * rng.standard_normal()), 4, 256))
        return {"input_ids": rng.integers(1000, 30_000, (1, length))}

    return draw


async def _load(
    address: str, name: str, per_s: float, draw: Callable[[np.random.Generator], dict[str, Any]]
) -> None:
    """Send groups of requests at random times, whatever has come back."""
    rng = np.random.default_rng(0)
    async with shapestream.connect(address) as client, trio.open_nursery() as nursery:
        while True:
            await trio.sleep(rng.exponential(AT_ONCE / per_s))
            for _ in range(AT_ONCE):
                nursery.start_soon(client.infer, name, draw(rng))


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
