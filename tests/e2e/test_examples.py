"""The examples as users run them: real processes over ipc, with a log instead of a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from examples import model_file
from examples.detector import kernels, model
from PIL import Image

pytestmark = [pytest.mark.e2e, pytest.mark.thorough]

ROOT = Path(__file__).parents[2]
# A loaded machine may need several times the usual quarter of a minute.
TIMEOUT_S = 240
# The first run proves models whose calls take long: a minute of computation, and several on a loaded machine.
FIRST_RUN_TIMEOUT_S = 900
OCR_PYTHON = ROOT / ".venv-ocr" / "bin" / "python"


def own_configuration(name: str, folder: Path, replacements: dict[str, str] | None = None) -> Path:
    """A copy of configs/NAME.yaml that listens below `folder`, so that it disturbs nobody else's run."""
    text = (ROOT / "configs" / f"{name}.yaml").read_text()
    # `make demo` and `make embeddings` run the files as they stand.
    changes = {
        "../.cache/": f"{ROOT}/.cache/",
        "    engine: openvino\n": "    engine: openvino\n    calibration_s: 0.3\n",
    }
    for old, new in (changes | (replacements or {})).items():
        assert old in text
        text = text.replace(old, new)
    copy = folder / f"{name}.yaml"
    copy.write_text(text)
    return copy


def run(
    program: str, *arguments: str | Path, python: str | Path = sys.executable, timeout_s: float = TIMEOUT_S
) -> subprocess.CompletedProcess[str]:
    """The program's end, with stdout and stderr together."""
    environment = {
        key: value for key, value in os.environ.items() if key not in {"FORCE_COLOR", "TTY_COMPATIBLE"}
    }
    command: Sequence[str | Path] = [python, "-m", program, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, timeout=timeout_s, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_demo_succeeds_and_draws(tmp_path: Path) -> None:
    """Every answer is right; the log is short and plain; the overview is a picture with colours."""
    config = own_configuration("demo", tmp_path)
    done = run("examples.detector.demo", "--quick", "--config", config, "--out", tmp_path / "out")
    assert 0 == done.returncode, done.stdout
    assert "OK: every answer equals, to the bit" in done.stdout
    assert "132 in" in done.stdout
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) < 70
    with Image.open(tmp_path / "out" / "overview.png") as overview:
        assert overview.width > 1000
        assert len(overview.convert("RGB").getcolors(1 << 24) or []) > 1000


def test_demo_fails_on_wrong_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the workers serve a model with another threshold, the demo says where, and its status is 1."""
    monkeypatch.setattr(model, "THRESHOLD", kernels.THRESHOLD + 1)
    model_file.write(model.build(), tmp_path / "detector.xml")
    config = own_configuration("demo", tmp_path, {f"{ROOT}/.cache/": f"{tmp_path}/"})
    done = run("examples.detector.demo", "--quick", "--config", config, "--out", tmp_path / "out")
    assert 1 == done.returncode, done.stdout
    assert "peaks or scores differ" in " ".join(done.stdout.split())  # lines are wrapped
    assert "FAILED" in done.stdout


def test_demo_says_why_the_server_does_not_start(tmp_path: Path) -> None:
    """A corrupt model file ends the demo at once, with status 1 and the server's own reason."""
    (tmp_path / "detector.xml").write_text("<net")
    config = own_configuration("demo", tmp_path, {f"{ROOT}/.cache/": f"{tmp_path}/"})
    done = run("examples.detector.demo", "--quick", "--config", config, "--out", tmp_path / "out")
    assert 1 == done.returncode, done.stdout
    assert "the server ended with status 3" in done.stdout
    assert "detector.xml" in done.stdout


def test_embeddings_succeed(tmp_path: Path) -> None:
    """Rows agree with the model run alone, and the queries are answered; the log is short and plain."""
    config = own_configuration("text", tmp_path)
    done = run("examples.embeddings.run", "--quick", "--config", config, "--out", tmp_path / "out")
    assert 0 == done.returncode, done.stdout
    assert "OK: cosine above 0.999" in done.stdout
    assert "300 in" in done.stdout
    assert "\x1b" not in done.stdout
    assert len(done.stdout.splitlines()) < 70


@pytest.mark.parametrize("program", ["examples.embedded.run", "examples.files.run"])
def test_programs_without_a_server_succeed(program: str) -> None:
    """Every answer is that of the picture alone."""
    done = run(program, "--quick")
    assert 0 == done.returncode, done.stdout
    assert "OK: " in done.stdout


def test_reading_succeeds_and_draws(tmp_path: Path) -> None:
    """Every answer of the chain equals its stages run one after the other; the sheet is a picture with colours."""
    config = own_configuration("reading", tmp_path)
    done = run("examples.reading.run", "--quick", "--config", config, "--out", tmp_path / "out")
    assert 0 == done.returncode, done.stdout
    assert "OK: every answer equals its stages run one after the other" in done.stdout
    assert "72 in" in done.stdout
    assert "\x1b" not in done.stdout
    with Image.open(tmp_path / "out" / "reading.png") as sheet:
        assert sheet.width > 1000
        assert len(sheet.convert("RGB").getcolors(1 << 24) or []) > 500


@pytest.mark.skipif(
    not OCR_PYTHON.exists(), reason="not run: `make ocr` sets .venv-ocr up, on Python below 3.13"
)
def test_ocr_succeeds_and_draws(tmp_path: Path) -> None:
    """Every answer equals its stages run alone, boxes and texts are the package's, and the sheet is a picture."""
    config = tmp_path / "ocr.yaml"
    config.write_text((ROOT / "configs" / "ocr.yaml").read_text().replace("../.cache/", f"{ROOT}/.cache/"))
    options = ["--quick", "--config", config, "--out", tmp_path / "out"]
    done = run("examples.ocr.run", *options, python=OCR_PYTHON, timeout_s=FIRST_RUN_TIMEOUT_S)
    assert 0 == done.returncode, done.stdout
    words = " ".join(done.stdout.split())  # lines are wrapped
    assert "OK: every answer equals its stages run alone" in words
    assert "of its 46 boxes 46 are ours within 2 pixels, and 46 of these have the same text" in words
    assert "\x1b" not in done.stdout
    with Image.open(tmp_path / "out" / "ocr.png") as sheet:
        assert sheet.width > 1000
        assert len(sheet.convert("RGB").getcolors(1 << 24) or []) > 500


def test_demo_that_is_ended_takes_its_server_along(tmp_path: Path) -> None:
    """SIGTERM in the middle of the stream ends the server and its workers too, with status 1."""
    config = own_configuration("demo", tmp_path)
    command = [sys.executable, "-m", "examples.detector.demo", "--config", config, "--out", tmp_path / "out"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        while not (line := demo.stdout.readline()).startswith("streaming"):
            assert line, "the demo ended before it streamed"
        demo.send_signal(signal.SIGSTOP)  # so that it is not through before this slow test has looked
        children = psutil.Process(demo.pid).children(recursive=True)
        demo.terminate()
        demo.send_signal(signal.SIGCONT)
        assert "ended by SIGTERM" in demo.stdout.read()
        assert 1 == demo.wait(TIMEOUT_S)
    assert len(children) >= 3
    _, alive = psutil.wait_procs(children, timeout=TIMEOUT_S)
    assert [] == alive
