"""Python processes that fork from a process that has already imported everything.

Importing torch, DeepSpeed, transformers and vLLM is most of the start-up of a small model.
"""
