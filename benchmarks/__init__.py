"""Measurements as ratios: everything that is compared runs in one process's rounds, interleaved, and medians are printed."""
