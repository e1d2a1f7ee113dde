"""The proof of a model: inputs, cases, comparison and verdict. The face is `shapestream_engine.probe`."""
