"""Evaluation of a model: ask it benchmarks, judge its responses, and compare the scores with the paper's Table 1."""
