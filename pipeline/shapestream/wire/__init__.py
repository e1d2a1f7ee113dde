"""Protocol version 1: what travels, and how (docs/protocol.md)."""
