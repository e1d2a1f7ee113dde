"""What all tests share: caches for one run of the tests, never the user's own, and a logging that is nobody's leftover."""

from __future__ import annotations

import gc
import math
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import structlog
from hypothesis import HealthCheck, settings
from tests.progress import Progress

from shapestream.loading import models, trials
from shapestream_engine import calibration
from shapestream_engine.probing.cache import ENVIRONMENT

# Tests import engines by themselves, and no run of them is to be reported anywhere.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type] # Python's way to say that there is none
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# No test asserts a time, and Hypothesis' own limits are times: 200 ms per example, and a second for making ten of them.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# Whether a change lands is to depend on the change, and not on what is drawn; everybody else's run draws anew.
settings.register_profile("landing", settings.get_profile("any machine"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "any machine"))

# Modules and tests stay until the end: the search for cycles among them was a thirtieth of a run.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Tell how far a run is, in the process that prints."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Progress(config))


def pytest_collection_finish() -> None:
    """Collect garbage from here on, among what the tests make."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _own_proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    run = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent  # what one process of the run has proved, the others need not
    with pytest.MonkeyPatch.context() as patch:
        for variable, name in ((ENVIRONMENT, "proofs"), (calibration.ENVIRONMENT, "costs")):
            (run / name).mkdir(exist_ok=True)
            patch.setenv(variable, str(run / name))
        yield


@pytest.fixture(autouse=True, scope="session")
def _any_function() -> Iterator[None]:
    """Tests serve functions of their own, which no package registers; processes that they start inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(models.ENVIRONMENT, "1")
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_news_of_trials() -> Iterator[None]:
    """What `check` writes to stderr is compared, and a slow machine has no line more there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "NEWS_EVERY_S", math.inf)
        yield


@pytest.fixture(autouse=True, scope="session")
def _interruptible() -> Iterator[None]:
    """A shell lets what it starts in the background ignore Ctrl-C, and that is inherited; tests press it."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.fixture(autouse=True)
def _fresh_logging() -> Iterator[None]:
    """A command that a test runs in this process sets logging up for itself; the next test must not inherit that."""
    yield
    structlog.reset_defaults()
