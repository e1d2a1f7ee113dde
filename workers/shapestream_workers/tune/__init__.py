"""`shapestream tune`: the best settings for a model and a trace of its shapes, decided on measurements of both."""
