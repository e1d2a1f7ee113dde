"""What all tests share: proofs and costs are kept for one run of the tests, and never in the user's own cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shapestream_engine import calibration_cache
from shapestream_engine.probing.cache import ENVIRONMENT


@pytest.fixture(autouse=True, scope="session")
def _own_proofs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, str(tmp_path_factory.mktemp("proofs")))
        patch.setenv(calibration_cache.ENVIRONMENT, str(tmp_path_factory.mktemp("costs")))
        yield
