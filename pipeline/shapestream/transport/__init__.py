"""Sockets that send and receive frames: ZeroMQ's under trio, and a stand-in within one process."""
