"""Worker processes kept alive: core.py decides (pure), processes.py acts."""
