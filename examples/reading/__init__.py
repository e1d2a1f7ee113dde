"""An example of a chain: a detector, a crop of each blob that it finds, and what is read of each crop."""
