"""Python processes that fork from one which has imported everything.

A run on the CPU is half a dozen processes, and each of them imports torch, DeepSpeed, transformers and vLLM: most of
the start-up of a small model. With this they are imported once; what was copied on write stays shared memory.

    serving.py   starts the server for the time of a block, and names the executable that stands for `python`
    client.py    that executable: hands over its arguments, environment and open files, then stands for its child:
                 signals go down, the exit status comes up
    server.py    imports, waits, forks

Knows nothing of what is imported: the caller names a function for that (`cpu.warm_up`).
"""
