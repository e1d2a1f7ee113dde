"""Two whole uses of shapestream: model, server, producers, and a check of every answer."""
