"""A server inside a program, under trio, under asyncio, and without an event loop."""
