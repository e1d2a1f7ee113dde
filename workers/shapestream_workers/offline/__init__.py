"""`shapestream run`: a model over files, in order, with results that a killed run does not lose."""
