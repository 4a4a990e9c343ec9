"""Made-up runs of a study, in the form that records have."""

import numpy as np

from bapo_openrlhf.workbench.report.runs import Run, groups_frame
from bapo_openrlhf.workbench.study.data import StudyRun
from bapo_openrlhf.workbench.study.definition import Arm, Claim, Study

METHODS = {"plain": ("GRPO", "PPO"), "bapo": ("BAPO-GRPO", "BA-PPO"), "mopps": ("MoPPS", "MoPPS")}
METHODS |= {name: (name, name) for name in ("bapo_without_x2", "bapo_without_x3", "dots", "repo", "remix")}


def make_arms(methods=tuple(METHODS), paths=("group", "critic")):
    return tuple(
        Arm(method, path, METHODS[method][path == "critic"], {"adapt.method": method})
        for path in paths
        for method in methods
    )


def make_study(arms=None, seeds=(1, 2, 3), **others):
    """A study with these arms, whose claims compare BAPO with the plain method."""
    arms = make_arms(("plain", "bapo", "mopps")) if arms is None else arms
    claims = (
        Claim("BA-PPO ends above PPO", "A.9", "bapo-critic", "plain-critic", "accuracy"),
        Claim("BAPO generates as many responses as GRPO", "Fig. 9", "bapo-group", "plain-group", "rollouts", 1.0, 0.2),
        Claim("BAPO solves more", "Fig. 7", "bapo-group", "plain-group", "solved"),
    )
    parts = {"evaluations": ("cd34", "cd4"), "targets": (0.2, 0.3), "claims": claims}
    return Study("made up", arms, tuple(seeds), **(parts | others))


def make_run(arm, seed, *, steps=12, groups=True, evaluations=True, planned=None, gain=0.0):
    """One seed of an arm. `gain` is added to its accuracies."""
    rng = np.random.default_rng([seed, sum(map(ord, arm.name))])
    adapted = arm.method != "plain"
    rows, generated = [], []
    skill = rng.uniform(-3, 1, size=16)
    totals = dict.fromkeys(("rollouts", "generated", "trained"), 0)
    for step in range(1, steps + 1):
        progress = step / steps
        means = []
        for prompt in rng.choice(16, size=16, replace=False):
            chance = 1 / (1 + np.exp(-(skill[prompt] + 2.5 * progress + 8 * gain)))
            mean = rng.binomial(8, chance) / 8
            means.append(mean)
            generated.append({
                "step": step, "uid": len(generated), "prompt": f"p{prompt}", "source": "fresh",
                "state": "filtered" if mean in (0, 1) else "fresh", "mean": mean, "responses": 8, "tokens": 56,
            })  # fmt: skip
        fresh = sum(mean not in (0, 1) for mean in means)
        replayed = int(rng.integers(0, 6)) if adapted else 0
        renewed = int(rng.integers(0, 4)) if adapted and step % 5 == 0 else 0
        totals["rollouts"] += 8 * len(means) + (256 if renewed else 0)
        totals["generated"] += 56 * len(means)
        totals["trained"] += 56 * (fresh + replayed + renewed)
        seconds = {"generation": rng.uniform(0.4, 0.6), "make_experience": 0.07, "ppo_train": rng.uniform(0.2, 0.4)}
        row = {
            "step": step, "reward/fresh_mean": float(np.mean(means)), "rollouts/total": totals["rollouts"],
            "tokens/generated_total": totals["generated"], "tokens/trained_total": totals["trained"],
            "groups/fresh": fresh, "groups/reevaluated": renewed, "groups/replayed": replayed,
            "groups/capacity": 32, "entropy_loss": 0.5 * (1 - progress) + rng.uniform(0, 0.05),
            "response_length": 7 + rng.uniform(-0.3, 0.3), "actor_grad_norm": rng.lognormal(-0.5, 0.4),
            **{f"timing/{name}": float(value) for name, value in seconds.items()},
            "timing/step_total": float(sum(seconds.values())),
        }  # fmt: skip
        if adapted:
            row |= {"theory/k1": 2.0, "theory/k2": 2.0, "theory/k3": 1.2, "theory/bound": rng.normal(-0.1, 0.06)}
            for source, size in (("fresh", 0.01), ("replayed", 0.05)):
                row |= {f"tv/{source}": rng.uniform(0, 2 * size), f"theory/bound_{source}": rng.normal(-0.1, size)}
        rows.append(row)
    held_out = [
        {"step": step, **{
            f"eval_{name}_pass{k}": float(0.1 * k**0.5 + 0.1 * step / steps + gain + shift + rng.normal(0, 0.015))
            for name, shift in (("cd34", 0.08), ("cd4", 0.0)) for k in (1, 4)
        }}
        for step in sorted({0, steps // 4, steps // 2, 3 * steps // 4, steps})
    ]  # fmt: skip
    metadata = {
        "name": f"{arm.name}-{seed}", "seed": seed, "total_steps": planned or steps,
        "config": {"adapt.method": arm.method, "train.max_epochs": 2, "actor.adam.lr": 1e-4},
    }  # fmt: skip
    generated, held_out = generated if groups else [], held_out if evaluations else []
    run = Run(f"{arm.name}-{seed}", rows, metadata, groups_frame(generated), evaluations=held_out)
    return StudyRun(arm, seed, run)
