"""How close the pipeline comes to the best that anyone could do: `python -m benchmarks.limit`.

MiniLM over sentences of all lengths, four ways in interleaved rounds: batched by an oracle that knows the whole trace, one
sentence at a time, in order of arrival padded to the longest, and through the whole pipeline. docs/performance.md.
"""

import shapestream_engine.backends.openvino  # noqa: F401 - imports openvino without its telemetry
