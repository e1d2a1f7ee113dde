"""A model over a folder of pictures, by `shapestream run`, which is killed once and goes on."""
