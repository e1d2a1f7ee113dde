"""How a model is put to the proof: inputs, cases, comparison and verdict. The face is `shapestream_engine.probe`."""
