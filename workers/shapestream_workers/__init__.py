"""The processes of shapestream: the command line, workers, and the supervisor that starts them."""

# Exit statuses of the commands and of worker processes. Typer's own 2 means wrong usage.
EXIT_OK = 0
EXIT_RUNTIME = 1
"""An error while running."""
EXIT_CONFIGURATION = 3
"""The configuration cannot be used. Another start would not help."""
EXIT_UNUSABLE = 4
"""The server refused this worker process: it has other files or another engine of a model than those that are served, or
it speaks another version of the protocol. A new process may be accepted."""
