"""What a run would need, predicted from few named constants: memory and responses. Nothing is measured.

constants   every number that is assumed, with its source
shapes      a model's layers, and its parameters
workload    what the flags say, as far as a plan needs it
groups      groups of a step and of a run, for each algorithm
memory      bytes on a GPU and of the replay buffer, and what does not fit
host        bytes in a machine's memory, and on the disk
proposal    the ZeRO stage, and whether activations are computed again
verdict     whether the configuration fits, and what to change
output      the plan as a page of tables, by algorithm, and by model and GPUs
"""
