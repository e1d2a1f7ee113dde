"""`python -m benchmarks.ablations`: what the scheduler's mechanisms were worth, at the commit before their removal."""
