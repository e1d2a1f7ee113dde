"""Two whole uses of shapestream: model, server, producers, and a check of every answer."""

import shapestream_engine.backends.openvino  # noqa: F401 - imports openvino without its telemetry
