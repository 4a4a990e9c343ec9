"""What a run would take, predicted from few named constants: responses, time, traffic and memory. Nothing is measured.

constants   every number that is assumed, with its source
shapes      a model's layers, and its parameters
workload    what the flags say, as far as a plan needs it
measured    shares of groups, from a run's record
groups      groups of a step and of a run, for each algorithm
times       seconds of each phase
memory      bytes on a GPU and on the host, and what does not fit
verdict     whether the configuration fits, and what to change
plan        the grid of models, GPUs and algorithms
output      the plan as tables, page and picture
"""
