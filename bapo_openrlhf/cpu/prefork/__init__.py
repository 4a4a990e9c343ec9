"""Python processes that fork from a process that has already imported everything.

A run on the CPU has half a dozen processes. Each would import torch, DeepSpeed, transformers and vLLM, which is most of
the start-up of a small model. Here one process imports them, and the others are its copies. They share its memory until
they write to it.

    serving.py   starts the server for the time of a block, and names the executable that replaces `python`
    client.py    this executable: it sends its arguments, environment and open files to the server, then represents the
                 forked child: it forwards signals to the child and ends with the child's exit status
    server.py    imports, waits, forks

The package does not know what is imported. The caller names a function for that (`cpu.stack.warm_up`).
"""
