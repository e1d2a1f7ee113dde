"""Random models with a ground truth about batching and padding, against which the proof of safety is judged.

python -m tests.engine.wrong_models --draws 500 --seed 1
"""
