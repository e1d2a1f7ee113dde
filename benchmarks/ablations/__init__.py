"""`python -m benchmarks.ablations`: how much each mechanism of the scheduler is worth, on simulated time."""
