"""Chains of models as one request: what follows from each answer. Pure: no clock, no event loop, no socket."""
