"""Python processes that fork from a process that has already imported everything.

    serving.py   starts the server for the time of a block, and names the executable that replaces `python`
    client.py    this executable: it asks the server for a child, then forwards signals to it and ends with its status
    server.py    imports, waits, forks

Importing torch, DeepSpeed, transformers and vLLM is most of the start-up of a small model.
"""
