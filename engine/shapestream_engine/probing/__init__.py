"""The proof of a model: inputs, cases, comparison and verdict. `shapestream_engine.probe` is the entry point."""
