"""Serving without a server: traces of shapes, and the scheduler over them on virtual time.

`trace.py` reads and `trace_recorder.py` writes what a server saw; `generator.py` makes up what one might see;
`simulator.py` plays either to the same `Scheduler` object that the server uses. No socket, no clock, no tensor.
"""
