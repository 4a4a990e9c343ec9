"""Made-up runs of a study, in the form that records have."""

import decision_stages as stages

from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.workbench.study.runner import Planned

STEPS, OF_STEP = 4, 64  # steps of a run, and responses of a step
LEVELS = ("four_terms", "five_terms", "six_terms", "seven_terms")
MADE = {"commit": "a" * 40, "cpu": "Xeon, amx_bf16", "versions": {"torch": "2", "python": "3.11"}, "command": "made"}
GROUPS = (("fresh", 0.0, 100), ("fresh", 0.5, 300), ("filtered", 1.0, 100))  # of a step: state, mean, tokens


def flag(run: Planned, name: str, default=None):
    """The value of a flag in the run's words."""
    found = [word.partition("=")[2] for word in run.words if word.startswith(f"--{name}=")]
    return found[-1] if found else default


def write_stage(name, root, top=lambda method, rate, seed: 0.5, **more):
    """Make the runs of a stage until none is left, as `write_run` does. Returns them.

    Args:
        top: A function of the method, the rate and the seed.
        more: Other arguments of `write_run`: a function of the run for each.
    """
    made, stage = [], stages.stage_of(name)
    while left := [run for run in stages.planned(stage, root) if not stages.ended(run)]:
        for run in left:
            height = top(stages.method_of(run.arm), float(flag(run, stage.rate, 0)), run.seed)
            write_run(run, height, **{argument: of_run(run) for argument, of_run in more.items()})
        made += left
    return made


def write_run(
    run: Planned, top: float, *, trained: int = 400, update: float = 1.0, norm: float = 2.0, explained=(), metrics=None,
    **about,
) -> None:  # fmt: skip
    """Write the record of a run that is done.

    Args:
        top: Held-out accuracy after the last step. It rises in a straight line from 0.2064.
        trained: Tokens trained on in a step, which generates 500.
        update: Seconds of an update. A response takes 0.01.
        norm: Norm of the gradient in the even steps; in the others it is 0.5.
        explained: What the critic explains in each step; nothing without a critic.
        metrics: Other metrics of a step: a function of its number.
        about: Other values of MADE.
    """
    epochs = int(flag(run, "train.max_epochs", 1))
    config = {"train.max_epochs": epochs, "actor.adam.lr": float(flag(run, "actor.adam.lr", 0)), "actor.max_norm": 1.0,
              "train.batch_size": int(flag(run, "train.batch_size", OF_STEP)),
              "rollout.n_samples_per_prompt": 8, "adapt.critic_groups": flag(run, "adapt.critic_groups"),
              "adapt.critic_epochs": int(flag(run, "adapt.critic_epochs", 1)),
              "adapt.skip_zero_advantage": any("skip_two_updates" in word for word in run.words)}  # fmt: skip
    facts = {"name": run.name, "algorithm": "made", "seed": run.seed, "started": "now", "total_steps": STEPS}
    record.begin_run(run.folder, {**facts, **MADE, **about, "config": config})
    for step in range(1, STEPS + 1):
        record.append_rows(run.folder, record.METRICS, step, [{
            "rollouts/step": OF_STEP, "rollouts/total": OF_STEP * step, "tokens/generated_total": 500 * step,
            "tokens/trained": trained, "tokens/trained_total": trained * step, "responses/trained": OF_STEP,
            "timing/generation": 0.01 * OF_STEP, "timing/step_total": 0.01 * OF_STEP + update,
            "actor_grad_norm": 0.5 if step % 2 else norm, "ppo_clip_ratio": 0.25,
            **({"value/explained_variance": explained[step - 1]} if explained else {}),
            **(metrics(step) if metrics else {}),
        }])  # fmt: skip
        record.append_rows(run.folder, record.GROUPS, step, [
            {"uid": 3 * step + n, "prompt": f"p{n}", "source": "fresh", "state": state, "mean": mean, "responses": 8,
             "tokens": tokens} for n, (state, mean, tokens) in enumerate(GROUPS)])  # fmt: skip
        height = 0.2064 + (top - 0.2064) * step / STEPS
        record.append_rows(run.folder, record.EVALUATIONS, step, [{f"eval_{level}_pass1": height for level in LEVELS}])
    record.write_summary(run.folder, {"algorithm": "made", "seed": run.seed, "seconds": {"whole_run": 100.0 + update}})
