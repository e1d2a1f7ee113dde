"""Log lines and counters of the server. Telemetry decides nothing and holds no tensor data."""
