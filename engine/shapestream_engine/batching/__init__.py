"""From requests to inference calls and back: which calls there are, what goes into them, and whose is what comes out.

The strategies are part of a signature, and what gathers and splits is made from one, so nothing is imported here.
"""
