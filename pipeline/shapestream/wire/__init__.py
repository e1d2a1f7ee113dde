"""Protocol version 1: entries, messages and their encoding (docs/protocol.md)."""
