"""Replay in TRL: its GRPOTrainer on X1 and X3 of "Buffer Matters" (arXiv 2602.20722), which `bapo_openrlhf` selects.

README.md says how to run it. Only the pure layer is used: groups in, a batch out.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bapo_openrlhf.adapt.batch import Batch
from bapo_openrlhf.adapt.group import Group, Prompt, Response
from bapo_openrlhf.adapt.ledger import Ledger
from bapo_openrlhf.adapt.theory import LOG_RATIO_CAP
from bapo_openrlhf.adapt.thresholds import Interval
from bapo_openrlhf.adapt.vocabulary import SOURCES
from bapo_openrlhf.methods import BAPO
from bapo_openrlhf.tasks import countdown

FILLER = -1  # in the place of a source: a row whose tokens are all masked


class ReplayGRPOTrainer(GRPOTrainer):
    """GRPOTrainer that trains on fresh groups with signal (X1) and, in the room that is left, on replayed ones (X3).

    A batch has as many rows as TRL generated, so TRL makes its micro-batches as ever. Rows that neither source needs
    are *fillers*: their tokens are masked and change no gradient. A replayed group keeps the advantages that TRL gave
    it and the log-probs of the policy that generated it.

    Args:
        args: As for GRPOTrainer. Its loss must be the mean over the tokens of the batch, so that fillers do not count.
        adapt: Fields of `BAPO`, for example replay_steps.
        others: The other arguments of GRPOTrainer, by name.

    Raises:
        ValueError: A field of `args` has a value that this example does not support.
    """

    def __init__(self, *, args: GRPOConfig, adapt: dict[str, Any] | None = None, **others: Any) -> None:
        for name, allowed in {"loss_type": "dapo", "beta": 0.0, "use_vllm": False, "world_size": 1}.items():
            if (value := getattr(args, name)) != allowed:
                raise ValueError(f"{name} is {value}; it must be {allowed}")
        sizes = {"capacity": args.generation_batch_size // args.num_generations, "group_size": args.num_generations}
        self.method = BAPO(**sizes, seed=args.seed, reevaluate_every=0, **(adapt or {}))  # 0: no X2
        self.ledger = Ledger()
        self.rollouts = 0
        super().__init__(args=args, **others)

    def _calculate_rewards(self, *args: Any, **words: Any) -> torch.Tensor:
        """Also remember the reward of each row. It is NaN if no reward function gave one."""
        parts = super()._calculate_rewards(*args, **words)
        total = (parts * self.reward_weights.to(parts.device)).nansum(1)
        self.rewards = torch.where(parts.isnan().all(1), torch.nan, total).tolist()
        return parts

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Turn the rows that TRL generated into groups, and return the rows of the batch that is made of these."""
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        if unsupported := {"pixel_values", "tool_mask"} & set(output):
            raise ValueError(f"the rows have {', '.join(unsupported)}; they must be text without images and tools")
        responses = self._responses(output)
        fresh = self._groups(inputs, responses)
        self.method.begin_step(self.rollouts)  # groups that are too old leave
        batch = self.method.build_batch(self.rollouts, fresh, [])
        counts, _ = self.ledger.settle(fresh, batch)  # an error unless each group is in one state
        for name in ("generated", "fresh", "filtered"):
            self._metrics["train"][f"groups/{name}"].append(counts[name])
        self._metrics["train"]["groups/replayed"].append(len(batch.replayed))
        self.rollouts += 1
        return self._rows(batch, responses[0])

    def _responses(self, output: dict[str, Any]) -> list[Response]:
        """Each row as a response without padding, with the log-probs of today's policy, which generated it."""
        ids, masks = ([output[f"{part}_{kind}"] for part in ("prompt", "completion")] for kind in ("ids", "mask"))
        log_probs = output.get("old_per_token_logps")
        if log_probs is None:  # TRL computes them only if the weights may move before it trains on these rows
            with torch.no_grad():
                log_probs, _, _ = self._get_per_token_logps_and_entropies(
                    self.model, torch.cat(ids, 1), torch.cat(masks, 1), ids[1].size(1), self.args.train_batch_size
                )
        responses = []
        for row, reward in enumerate(self.rewards):
            prompt, completion = (part[row][mask[row].bool()].cpu() for part, mask in zip(ids, masks, strict=True))
            span = (len(prompt), len(prompt) + len(completion))
            kept = log_probs[row][masks[1][row].bool()].float().cpu()
            extras = {"advantage": output["advantages"][row].item()}
            responses.append(Response(torch.cat([prompt, completion]).numpy(), (span,), kept.numpy(), reward, extras))
        return responses

    def _groups(self, inputs: Sequence[dict[str, Any]], responses: list[Response]) -> list[Group]:
        """The groups of this rollout. A row without a reward is an error."""
        first, size, groups = self.ledger.counts["generated"], self.num_generations, []
        for number, start in enumerate(range(0, len(responses), size)):
            prompt, members = Prompt(str(inputs[start]["prompt"]), str(inputs[start])), responses[start : start + size]
            groups.append(Group(first + number, prompt, tuple(members), self.rollouts, self.state.global_step))
        return groups

    def _rows(self, batch: Batch, filler: Response) -> dict[str, torch.Tensor]:
        """What TRL's loss takes: a row for each response of the batch, then fillers."""
        rows = [(SOURCES.index(source), one) for source, group in batch.with_sources() for one in group.responses]
        rows += [(FILLER, filler)] * (self.args.generation_batch_size - len(rows))
        sources, responses = zip(*rows, strict=True)
        parts = [np.split(one.token_ids.astype(np.int64), one.action_spans[0][:1]) for one in responses]
        prompts, completions = zip(*parts, strict=True)
        counts = [np.full_like(one, source != FILLER) for source, one in zip(sources, completions, strict=True)]
        pad, mask = self._tokenizer.pad_token_id, padded(counts)
        columns = {
            "prompt_ids": padded(prompts, "left", pad),
            "prompt_mask": padded(map(np.ones_like, prompts), "left"),
            "completion_ids": padded(completions, "right", pad),
            "completion_mask": mask,
            "num_items_in_batch": mask.sum(),
            "advantages": torch.tensor([one.extras["advantage"] for one in responses]),
            # Without them, TRL takes today's log-probs, and all importance ratios are 1.
            "old_per_token_logps": padded(one.log_probs for one in responses),
            "source": torch.tensor(sources),
        }
        return {name: column.to(self.accelerator.device) for name, column in columns.items()}

    def _get_per_token_logps_and_entropies(self, *args: Any, **words: Any) -> tuple[torch.Tensor, ...]:
        """Also remember the log-probs."""
        result = super()._get_per_token_logps_and_entropies(*args, **words)
        self.log_probs = result[0].detach()
        return result

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Also log rho of Eq. 3, pi(y|x) / alpha(y|x), of the responses of each source."""
        loss = super()._compute_loss(model, inputs)
        if "source" in inputs:
            moved = ((self.log_probs - inputs["old_per_token_logps"]) * inputs["completion_mask"]).sum(1)
            for number, source in enumerate(SOURCES):
                if ratios := moved[inputs["source"] == number].clamp(max=LOG_RATIO_CAP).exp().tolist():
                    self._metrics["train"][f"importance/{source}_mean"] += ratios
        return loss


def padded(rows: Iterable[np.ndarray], side: str = "right", value: int = 0) -> torch.Tensor:
    """The rows as one tensor, with `value` on one side of those that are shorter than the longest."""
    return pad_sequence(list(map(torch.from_numpy, rows)), batch_first=True, padding_value=value, padding_side=side)


class Lines(TrainerCallback):
    """Prints a line for each step."""

    COLUMNS = ("groups/generated", "groups/fresh", "groups/replayed", "importance/replayed_mean", "reward")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_words: Any) -> None:
        """Those of the step's numbers that are about replay. TRL's loggers get all of them."""
        if logs and self.COLUMNS[0] in logs:
            cells = [f"{name.split('/')[-1]} {logs[name]:.4g}" for name in self.COLUMNS if name in logs]
            print(f"step {state.global_step}: {', '.join(cells)}", flush=True)


def rewards(prompts: list[str], completions: list[str], label: list[str], **_others: Any) -> list[float]:
    """The task's own reward."""
    queries = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    return [float(reward) for reward in countdown.reward_func(queries, prompts, label)["rewards"]]


def main(argv: Sequence[str] | None = None) -> ReplayGRPOTrainer:
    """Train for some steps on the CPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="runs/base_model")
    parser.add_argument("--data", default="runs/data/train.jsonl")
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args(argv)
    config = GRPOConfig(
        output_dir="runs/trl", use_cpu=True, bf16=False, model_init_kwargs={"dtype": "float32"}, max_steps=given.steps,
        per_device_train_batch_size=64, gradient_accumulation_steps=2, num_generations=8, max_completion_length=24,
        learning_rate=5e-4, lr_scheduler_type="constant", gradient_checkpointing=False, logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    least, most = Fraction(1, 8), Fraction(7, 8)  # every group with signal is replayed, as in bapo_replay_all.yaml
    trainer = ReplayGRPOTrainer(
        model=given.model, reward_funcs=rewards, args=config, callbacks=[Lines()],
        adapt={"c2": Interval(least, least), "c3": Interval(most, most)},
        train_dataset=Dataset.from_json(given.data).rename_column("input", "prompt"),
        processing_class=AutoTokenizer.from_pretrained(given.model, padding_side="left"),
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    print("groups:", ", ".join(f"{count} {state}" for state, count in trainer.ledger.counts.items() if count))
    return trainer


if __name__ == "__main__":
    main()
