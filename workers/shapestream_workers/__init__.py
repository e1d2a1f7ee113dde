"""The processes of shapestream: the command line, workers, and the supervisor that starts them."""
