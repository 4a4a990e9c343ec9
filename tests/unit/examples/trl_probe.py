"""Runs examples/trl, and writes what it logged next to what plain transformers compute from the weights of each step.

    TRL_PYTHON trl_probe.py MODEL DATA STEPS        # writes steps.json into the current folder

For each step and source, importance ratios and advantages of all responses; and the loss.
"""

import copy
import json
import statistics
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from torch.func import functional_call

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "trl"))
import replay_grpo

LOW, HIGH = 0.8, 1.2  # TRL's clip range


class Probe(replay_grpo.ReplayGRPOTrainer):
    def __init__(self, **words):
        super().__init__(**words)
        self.weights, self.batches, self.losses = [], [], []
        build = self.method.build_batch

        def build_batch(*args):
            self.batches.append(build(*args))
            return self.batches[-1]

        self.method.build_batch = build_batch

    def _generate_and_score_completions(self, inputs):
        self.weights.append(copy.deepcopy(self.model.state_dict()))
        self.losses.append(0.0)
        return super()._generate_and_score_completions(inputs)

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.losses[-1] += loss.item()
        return loss


@torch.no_grad()
def log_probs(model, weights, response):
    """Log-probs of the generated tokens, from the logits of one sequence without padding."""
    ids = torch.tensor(response.token_ids).long()
    [(start, end)] = response.action_spans
    logits = functional_call(model, weights, kwargs={"input_ids": ids[None]}).logits[0, start - 1 : end - 1]
    return logits.log_softmax(-1)[torch.arange(end - start), ids[start:end]]


def recomputed(trainer, step):
    """Ratios of whole responses and advantages by source, and the loss: the mean over tokens of min(w A, clip(w) A)."""
    ratios_of, terms = {"fresh": [], "replayed": []}, []
    for source, group in trainer.batches[step].with_sources():
        rewards = [response.reward for response in group.responses]
        for response in group.responses:
            current, then = (log_probs(trainer.model, trainer.weights[at], response) for at in (step, group.step))
            advantage = (response.reward - statistics.mean(rewards)) / (statistics.stdev(rewards) + 1e-4)
            ratios = (current - then).exp()
            terms.append(torch.minimum(ratios * advantage, ratios.clamp(LOW, HIGH) * advantage))
            ratios_of[source].append(ratios.prod().item())
    return {"ratios": ratios_of, "loss": -torch.cat(terms).mean().item()}


def refused():
    try:
        replay_grpo.ReplayGRPOTrainer(args=replay_grpo.GRPOConfig(beta=0.1, use_cpu=True, bf16=False))
    except ValueError as error:
        return str(error)


def always_right(prompts, **_others):
    return [1.0] * len(prompts)


if __name__ == "__main__":
    model, data, steps = sys.argv[1:]
    words = ["--model", model, "--data", data, "--steps"]
    report = {"refused": refused()}
    with patch.object(replay_grpo, "rewards", always_right):
        report["without_signal"] = replay_grpo.main([*words, "1"]).state.log_history[0]
    replay_grpo.ReplayGRPOTrainer = Probe
    trainer = replay_grpo.main([*words, steps])
    logged = [row for row in trainer.state.log_history if "groups/generated" in row]
    report["steps"] = [
        {"logged": row, "loss_of_trl": loss, **recomputed(trainer, step)}
        for step, (row, loss) in enumerate(zip(logged, trainer.losses, strict=True))
    ]
    Path("steps.json").write_text(json.dumps(report | {"counts": trainer.ledger.counts}))
