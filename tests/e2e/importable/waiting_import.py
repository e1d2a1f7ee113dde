"""A module whose import tells that it has begun, and never ends."""

import os
import threading
from pathlib import Path

(Path(os.environ["E2E_FOLDER"]) / f"began-{os.getpid()}").touch()
threading.Event().wait()
