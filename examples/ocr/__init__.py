"""An example of a chain with real weights: pages in, boxes and texts out, beside the package that the weights come from."""
