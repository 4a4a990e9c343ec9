"""What workers say of a gradient that is not finite, on DeepSpeed. A script: not_finite_workers.py FOLDER

FOLDER/model is a model. FOLDER/said.json will have, for each of CASES, what training on one sample says: first as it
is, and then with a gradient of nan behind a finite loss.
"""

import copy
import json
import math
import sys
from pathlib import Path

from one_process import set_up, worker

CASES = (*(("Policy", stage) for stage in range(4)), ("Critic", 2), ("Critic", 3))  # worker, ZeRO stage


def sample():
    """A sample of 5 tokens, the last 3 of them generated."""
    import torch
    from openrlhf.trainer.ppo_utils.experience import Experience

    fields = ("action_log_probs", "rollout_log_probs", "advantages", "values", "returns")
    return Experience(
        sequences=torch.tensor([[3, 4, 5, 6, 7]]),
        attention_mask=torch.ones(1, 5, dtype=torch.long),
        action_mask=torch.tensor([[0, 1, 1, 1]]),
        **{name: torch.full((1, 4), 0.5) for name in fields},
        total_length=torch.tensor([5.0]),
        response_length=torch.tensor([3.0]),
        info={"reward": torch.tensor([1.0])},
        index=[0],
    )


def train(process):
    from bapo_openrlhf.training.trainer.dealing import training_shares

    (share,) = training_shares([sample()], 1)
    process.take(**{name: value for name, (value,) in share.items()})
    try:
        status = process.fit(*([0.0] if hasattr(process, "actor") else []))
    except FloatingPointError as error:
        return str(error)
    return [value for name, value in status.items() if name.endswith("_grad_norm")]


def spoil(_module, _given, output):
    """Let the gradient of an output be nan."""
    output.register_hook(lambda gradient: gradient * math.nan)


def said(folder, args, kind, stage):
    args = copy.deepcopy(args)
    args.ds.zero_stage = stage
    process = worker(kind, args, str(folder / "model"), 10, *([None] if kind == "Policy" else []))
    first = train(process)
    model = (process.actor.model if kind == "Policy" else process.critic).module
    last = next(module for name, module in model.named_modules() if name.endswith("layers.1.mlp"))
    last.register_forward_hook(spoil)
    return [first, train(process)]


def main(folder):
    args = set_up(folder / "model", rollout__n_samples_per_prompt=2)
    result = [said(folder, args, *case) for case in CASES]
    (folder / "said.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
