"""The client: one pure session, one trio core, three thin faces (trio, asyncio, blocking)."""
