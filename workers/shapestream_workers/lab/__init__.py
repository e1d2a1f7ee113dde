"""The lab: `tune`, `simulate` and the simulator. Server, worker and client import nothing of it."""
