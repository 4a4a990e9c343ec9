"""Rotary frequencies as the workers have them after loading. A script: rotary_workers.py FOLDER

FOLDER has folders with models, and rows.jsonl. FOLDER/buffers.pt will have, for each of CASES, the frequencies and the
scaling of attention by name; and for an actor that resumes. The workers are those of a run, in this process and without
Ray.
"""

import copy
import sys
from pathlib import Path

from one_process import set_up, worker

# model folder, worker, ZeRO stage
ROPE_TYPES = ("linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
CASES = (
    *(("default", worker, 3) for worker in ("Policy", "PlainPolicy", "Critic", "PlainCritic", "Reference", "Reward")),
    *(("default", "Policy", stage) for stage in (0, 1, 2)),
    *((name, "Reference", 3) for name in (*ROPE_TYPES, "layers", "vision")),
)


def noted(model):
    """Copies of the frequencies of a model, and how its rotary modules scale attention."""
    result = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    for name, module in model.named_modules():
        result |= {f"{name}.{key}": value for key, value in vars(module).items() if key.endswith("attention_scaling")}
    return result


def models_of(process):
    return {name: part for name in ("actor", "ema_model", "critic", "model") if (part := getattr(process, name, None))}


def load(folder, args, name, kind, stage):
    args = copy.deepcopy(args)
    args.ds.zero_stage, args.ckpt.path = stage, str(folder / f"checkpoints{stage}")
    more = {"Policy": (10, None), "Critic": (10,)}.get(kind.removeprefix("Plain"), ())
    process = worker(kind, args, str(folder / name), *more)
    result = {role: noted(part) for role, part in models_of(process).items()}
    if (kind, stage) == ("Policy", 3):
        process.save_checkpoint("global_step1", {"step": 1})
        args.ckpt.load_enable = True
        again = worker(kind, args, str(folder / name), *more)
        assert again.get_checkpoint_states()["step"] == 1
        result["resumed"] = noted(again.actor)
    return result


def main(folder):
    given = {"data__prompt_dataset": folder / "rows.jsonl", "rollout__n_samples_per_prompt": 2}
    args = set_up(folder / "default", "--train.enable_ema", **given)

    import torch

    result = {case: load(folder, args, *case) for case in CASES}
    torch.save(result, folder / "buffers.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
