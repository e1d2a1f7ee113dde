"""From requests to inference calls and back: the plan of the calls, their inputs, and the division of their outputs.

Nothing is imported here: signatures import strategies, and this package imports signatures.
"""
