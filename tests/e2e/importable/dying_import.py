"""A module whose import ends the process."""

import os
import signal

os.kill(os.getpid(), signal.SIGKILL)
