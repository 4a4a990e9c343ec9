"""The real stack, a few steps at a time: Ray, DeepSpeed and vLLM on the CPU."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_faults import GRPO, same_steps
from transformers import AutoModelForCausalLM

from bapo_openrlhf.record import metrics
from bapo_openrlhf.record import run_record as record
from bapo_openrlhf.record.outcome import UNTRAINED

pytestmark = pytest.mark.stack

HERE = Path(__file__).parent
DELAY, EVERY = 3, 2  # v and m of the watched run: m is no multiple of v, so delayed weights must be put back
EXTRA_LOGS = ("length",)  # what reward.py and scripted_reward.py report
STEPS = 4  # of the runs that are compared with plain OpenRLHF
PLAIN = (str(HERE / "plain.py"),)
# Greedy sampling, and one prompt a step: OpenRLHF's generator returns groups in the order in which they were finished,
# and in bf16 another order of the rows makes another rounding, which grows until a token flips.
COMPARABLE = {
    "rollout__top_p": 1e-6, "rollout__batch_size": 1, "rollout__micro_batch_size": 4, "train__batch_size": 4,
    "train__micro_batch_size": 4, "data__max_samples": STEPS,
}  # fmt: skip


@pytest.fixture(scope="module")
def probe_run(watch, workspace):
    """Six steps of BA-PPO on 2 actor, 2 critic and 2 reference ranks and 2 engines; what the probe noted."""
    flags = {
        "algorithm": "ba_ppo", "adapt__rollout_delay": DELAY, "adapt__reevaluate_every": EVERY, "adapt__c3": "7/8",
        "algo__advantage__lambd": 0.9, "adapt__critic_lambd": 1.0, "adapt__value_pretraining": 3,
        "adapt__critic_groups": "generated", "critic__adam__lr": 1e-3, "vllm__num_engines": 2,
        "logger__tensorboard_dir": workspace / "tensorboard",
    }  # fmt: skip
    return watch("watched", **flags, **{f"{model}__num_gpus_per_node": 2 for model in ("actor", "critic", "ref")})


def noted_weights(folder):
    """By (step, kind): digests of the engines' weights at that generation; kind "actor": of the actor's in the step."""
    rows = [json.loads(line) for line in (folder / "weights.jsonl").read_text().splitlines()]
    assert all(one == row["weights"][0] for row in rows for one in row["weights"])
    return {(row["step"], row["kind"]): row["weights"][0] for row in rows}


def test_rollout_weights_change_only_at_multiples_of_v_and_reevaluation_uses_the_actors(probe_run):
    """The engines sample step t with the actor's weights of step t - t mod v, tensor by tensor.

    Step 4 lies between the syncs of 3 and 6: step 5 samples with the weights of step 3 again.
    """
    weights = noted_weights(probe_run[1])
    for step in range(6):
        assert weights[step, "fresh"] == weights[step - step % DELAY, "actor"]
    again = [step for step, kind in weights if kind == "reevaluated"]
    assert sorted(again) == [2, 4] and all(weights[step, "reevaluated"] == weights[step, "actor"] for step in again)
    for one, other in ((0, 2), (0, 3), (3, 4)):  # the actor does learn
        assert weights[one, "actor"] != weights[other, "actor"]


def tokens(data, name, index):
    return data[f"{index}/{name}"][data[f"{index}/action_mask"].astype(bool)]


def test_the_critic_learns_from_all_responses_before_the_actor_moves(probe_run):
    """VC-PPO: three passes over what the first step generated, with the rewards as targets of all tokens."""
    result, folder = probe_run
    given, batch = (np.load(folder / f"{name}0.npz") for name in ("pretraining", "experience"))
    first, *later = result.metrics
    everything = range(len(given["source"]))
    assert len(everything) == 4 * first["groups/generated"] > len(batch["source"]) == first["rollout/num_samples"]
    values, returns = (np.concatenate([tokens(given, name, n) for n in everything]) for name in ("values", "returns"))
    assert np.abs(returns - returns.round()).max() < 1e-3 and set(returns.round()) == {0, 1}  # lambda is 1
    assert 0 < first["value/pretraining_loss"] < np.mean((values - returns) ** 2) / 2
    before = 1 - (returns - values).var() / returns.var()
    # float32 has seven digits, and both variances are nearly equal
    assert first["value/explained_variance_before"] == pytest.approx(before, rel=1e-3, abs=1e-6)
    assert first["value/explained_variance_before"] < first["value/explained_variance"]
    weights = [sorted((folder / name).glob("*.safetensors")) for name in ("pretraining0", "actor0")]
    assert weights[0] and [f.read_bytes() for f in weights[0]] == [f.read_bytes() for f in weights[1]]
    assert not any("value/pretraining_loss" in row for row in later)


def critic_tokens(row):
    """Generated tokens of all groups of a step without failed ones, and of those that are replayed."""
    return row["tokens/generated"] + round(row.get("length/replayed", 0) * row["responses/replayed"])


def test_the_critic_trains_on_all_groups(probe_run):
    """On two ranks, dropped ones included; in the first step three times more on the fresh ones."""
    first, *later = probe_run[0].metrics
    assert sum(row["groups/failed"] + row["groups/nonfinite"] for row in probe_run[0].metrics) == 0
    assert first["tokens/critic"] == critic_tokens(first) + 3 * first["tokens/generated"]
    for row in later:
        assert row["tokens/critic"] == critic_tokens(row) > row["tokens/trained"] or not row["groups/filtered"]
        assert math.isfinite(row["critic_loss"]) and row["value/explained_variance_generated"] <= 1


def recomputed(model, data, index):
    """Log-probs of a sample's tokens under a model of transformers, which may be a folder, and its action mask."""
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    real = data[f"{index}/attention_mask"].astype(bool)
    tokens = torch.from_numpy(data[f"{index}/sequences"][real])[None]
    with torch.no_grad():
        log_probs = model(tokens).logits.float().log_softmax(-1)
    chosen = log_probs[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0].numpy()
    return chosen, data[f"{index}/action_mask"][: real.sum() - 1].astype(bool)


def test_importance_ratio_of_replayed_samples_is_exp_of_recomputed_minus_stored(probe_run):
    """The clip acts on pi/alpha: the loss's old log-probs are the stored ones, and today's come from today's actor."""
    checked = 0
    for step in range(1, 6):
        data = np.load(probe_run[1] / f"experience{step}.npz")
        replayed = np.flatnonzero(data["source"] == "replayed")
        assert not data["on_policy"][replayed].any()
        for index in replayed[:4]:
            old, stored = data[f"{index}/action_log_probs"], data[f"{index}/rollout_log_probs"]
            mask = data[f"{index}/action_mask"].astype(bool)
            assert np.array_equal(old[mask], stored[mask])
            current, actions = recomputed(probe_run[1] / f"actor{step}", data, index)
            expected = float((current - stored[: len(actions)])[actions].sum())
            assert data["log_ratios"][index] == pytest.approx(expected, abs=0.05)  # bf16 forward passes
            checked += 1
    assert checked >= 4


def test_old_log_probs_are_recomputed_if_the_current_policy_generated_the_sample(probe_run):
    for step, source in ((0, "fresh"), (3, "fresh"), (2, "reevaluated"), (4, "reevaluated")):
        data = np.load(probe_run[1] / f"experience{step}.npz")
        rows = np.flatnonzero(data["source"] == source)
        assert data["on_policy"][rows].all()
        for index in rows[:2]:
            current, actions = recomputed(probe_run[1] / f"actor{step}", data, index)
            old = data[f"{index}/action_log_probs"][: len(actions)]
            assert old[actions] == pytest.approx(current[actions], abs=0.03)


def test_replayed_samples_do_not_pass_the_reference_again(probe_run, workspace):
    """Two ranks share what is left; what was kept is what the reference model says of the samples."""
    result, folder = probe_run
    checked = 0
    for step in range(len(result.metrics)):
        data = np.load(folder / f"experience{step}.npz")
        replayed = np.flatnonzero(data["source"] == "replayed")
        for index in [*replayed[:3], *np.flatnonzero(data["source"] == "fresh")[:1]]:
            reference, actions = recomputed(workspace / "model", data, index)
            actual = data[f"{index}/base_action_log_probs"][: len(actions)]
            assert actual[actions] == pytest.approx(reference[actions], abs=0.03)
            checked += 1
    assert checked >= 8 and sum(row["tokens/reference_kept"] for row in result.metrics) > 0


def catalogued(rows, algorithm):
    """Each name in the rows is in the catalogue, and each that the catalogue promises is in some row.

    Returns the sources that no step trained on: their numbers are not there.
    """
    result = {name for row in rows for name in row} - {"step", *EXTRA_LOGS}
    assert result <= metrics.names(algorithm, optional=True)
    sources = [source for source in record.SOURCES if source != "prefixed"]  # it needs a method with prefixes
    absent = [source for source in sources if not any(row[f"groups/{source}"] for row in rows)]
    missing = metrics.names(algorithm, optional=False) - result
    assert not [name for name in missing if not any(source in name for source in absent)]
    return absent


def test_metrics_are_in_the_catalogue_and_come_to_tensorboard(probe_run, workspace):
    """All of them, as they are in metrics.jsonl, under train/."""
    assert catalogued(probe_run[0].metrics, "ba_ppo") == []
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (workspace / "tensorboard").rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file)).Reload()
    rows = probe_run[0].metrics
    assert set(events.Tags()["scalars"]) == {f"train/{name}" for row in rows for name in row} - {"train/step"}
    clipped = {row["step"]: row["clip/replayed"] for row in rows if row.get("clip/replayed") is not None}
    actual = {event.step: event.value for event in events.Scalars("train/clip/replayed")}
    assert clipped and actual == pytest.approx(clipped, rel=1e-5)


def run_plain(train, name, **flags):
    """A run of OpenRLHF's own command line, unchanged. It begins again if another process has taken a port of its own.

    OpenRLHF looks for a free port, closes it, and opens it again later. The runs of this project keep it open.
    """
    for _ in range(3):
        result = train(name, *PLAIN, status=None, run__name=None, **flags)
        if "EADDRINUSE" not in result.output:
            break
    assert result.status == 0, result.output[-6000:]
    return result


@pytest.fixture(scope="module")
def plain(train):
    return run_plain(train, "plain", **COMPARABLE)


COMPARED = (
    "policy_loss", "critic_loss", "reward", "return", "kl", "actor_grad_norm", "critic_grad_norm", "values", "actor_lr",
    "response_length",
)  # fmt: skip


def same_losses(result, plain, *but):
    assert len(result.metrics) == len(plain.logged) == STEPS
    for step, (ours, theirs) in enumerate(zip(result.metrics, plain.logged, strict=True)):
        for name in (name for name in COMPARED if name not in but):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), (step, name)


@pytest.mark.parametrize("faster", ["all", pytest.param("none", marks=pytest.mark.slow)])
def test_off_equals_plain_openrlhf(train, plain, faster):
    """`--algorithm ppo` through this project's command line: the same losses, step for step.

    All rewards are 1, so at its end the run says with its status that it learned nothing.
    """
    result = train(f"off_{faster}", status=UNTRAINED, **COMPARABLE, algorithm="ppo", run__faster=faster)
    same_losses(result, plain)
    assert catalogued(result.metrics, "ppo") == ["reevaluated", "replayed"]
    assert len(record.read_groups(result.folder)) == STEPS
    assert result.summary["groups"] == {"fresh": STEPS, "reevaluated": 0, "replayed": 0}


@pytest.mark.slow
def test_off_equals_plain_openrlhf_without_a_critic(train):
    flags = COMPARABLE | {"critic__model_name_or_path": None}
    plain = run_plain(train, "plain_grpo", algo__advantage__estimator="group_norm", **flags)
    result = train("off_grpo", status=UNTRAINED, **flags, algorithm="grpo")
    same_losses(result, plain, "critic_loss", "critic_grad_norm", "values")
    assert catalogued(result.metrics, "grpo") == ["reevaluated", "replayed"]


@pytest.mark.slow
def test_what_is_done_faster_changes_no_number(train):
    """The log-probs themselves are rounded otherwise; the tests above compare them with OpenRLHF's."""
    values = GRPO | {"data__max_samples": 24, "train__full_determinism_enable": True}
    wanted, *others = (
        train(f"faster_{number}", run__faster=parts, **values).metrics
        for number, parts in enumerate((["all"], ["weights", "log_probs"], ["requests", "log_probs"]))
    )
    for rows in others:
        same_steps(rows, wanted)


def final_weights(folder):
    return {name: weight for path in folder.glob("*.safetensors") for name, weight in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_averaged_weights_follow_the_last_optimizer_step(train, workspace, stage):
    """With a factor of 0 for what was before, the average is the weights. The training does not notice it."""
    result = []
    for name, average in (("no_average", {}), ("last_weights", {"train__enable_ema": True, "train__ema_beta": 0.0})):
        flags = GRPO | {"ds__zero_stage": stage, "train__full_determinism_enable": True} | average
        train(f"{name}_{stage}", **flags)
        result.append(final_weights(workspace / f"{name}_{stage}" / "model"))
    before = final_weights(workspace / "model")
    assert result[0].keys() == result[1].keys()
    assert all(torch.equal(weight, result[1][name]) for name, weight in result[0].items())
    assert any(not torch.equal(weight, before[name]) for name, weight in result[0].items())


@pytest.mark.slow
def test_layer_with_nothing_to_adapt_equals_plain_openrlhf(train, plain):
    """Filter none, no replay, no re-evaluation, v = 1: groups come out of the layer as they were.

    All rewards are equal, so that the run ends with the status of one that trained nothing.
    """
    nothing = {"filter": "none", "replay_steps": 0, "reevaluate_every": 0, "rollout_delay": 1}
    flags = COMPARABLE | {f"adapt__{name}": value for name, value in nothing.items()}
    result = train("through", algorithm="ba_ppo", status=UNTRAINED, **flags)
    # OpenRLHF's norm of the critic is that of the optimizer step before, except in the last micro-batches.
    same_losses(result, plain, "critic_grad_norm")


@pytest.mark.slow
def test_engines_sample_from_the_model_with_the_adapter_of_todays_actor(watch, workspace):
    """LoRA on 2 actor ranks under ZeRO-3 and 2 engines: transformers merges the saved adapter."""
    flags = {
        "algorithm": "bapo_grpo", "adapt__rollout_delay": 1, "actor__num_gpus_per_node": 2, "vllm__num_engines": 2,
        "ds__zero_stage": 3, "ds__lora__rank": 8, "ds__lora__alpha": 64, "actor__adam__lr": 1e-2,
        "data__max_samples": 32,
    }  # fmt: skip
    (_, folder), moved = watch("lora_run", **flags), 0.0
    base = AutoModelForCausalLM.from_pretrained(workspace / "model", dtype=torch.bfloat16)
    for step in range(4):
        merged = PeftModel.from_pretrained(copy.deepcopy(base), folder / f"actor{step}").merge_and_unload()
        data = np.load(folder / f"experience{step}.npz")
        fresh = np.flatnonzero(data["source"] == "fresh")
        assert data["on_policy"][fresh].all()
        for index in fresh[:6]:
            wanted, mask = recomputed(merged, data, index)
            assert data[f"{index}/rollout_log_probs"][: len(mask)][mask] == pytest.approx(wanted[mask], abs=0.05)
            if step >= 2:  # two updates have changed the adapter
                moved = max(moved, np.abs(wanted - recomputed(base, data, index)[0])[mask].max())
    assert moved > 0.2


@pytest.mark.slow
@pytest.mark.parametrize(("other", "cause"), [("read", "a second set of them"), ("sent", "did not reach the engines")])
def test_a_run_whose_engines_hold_other_weights_ends(train, other, cause):
    """Before its first update; or as soon as there are enough tokens after updates that did not reach the engines."""
    flags = GRPO | {"adapt__rollout_delay": 1, "actor__adam__lr": 1e-2, "ckpt__save_steps": 1}
    words = (f"other_{other}", str(HERE / "probe.py"), "other_weights")
    result = train(*words, status=1, environment={"OTHER": other}, **flags)
    last = result.output.strip().splitlines()[-1]
    assert cause in last and "adapt.max_gap is 0.02" in last, last
    steps = len(result.metrics if (result.folder / "metrics.jsonl").exists() else [])
    assert last.startswith(f"error: step {steps + 1}, making experience: ")
    assert steps == 0 if other == "read" else 1 <= steps < 6


PROMPTS, RESPONSES, MAX_NORM = 6, 4, 0.05
SKIPPING = GRPO | {  # a rollout has two whole optimizer steps and one of four samples
    "train__full_determinism_enable": True, "adapt__reevaluate_every": 0, "adapt__replay_steps": 0,
    "adapt__rollout_delay": 1, "actor__max_norm": MAX_NORM, "verifier__processes": 1,
    "reward__remote_url": HERE / "silent_step_reward.py", "rollout__batch_size": PROMPTS,
    "rollout__n_samples_per_prompt": RESPONSES, "rollout__micro_batch_size": 1, "train__batch_size": 10,
    "train__micro_batch_size": 1, "data__max_samples": PROMPTS * 3,
}  # fmt: skip


@pytest.mark.slow
def test_skipping_changes_no_weight(train, workspace):
    """Weights are equal bit by bit. Samples are shuffled, gradients are clipped, and one step skips all its samples."""
    runs = []
    for name, flags in (("control", {"adapt__filter": "none"}), ("skip", {"adapt__skip_zero_advantage": True})):
        result = train(f"{name}_of_skipping", environment={"PROMPTS": str(PROMPTS)}, **SKIPPING | flags)
        weights = load_file(workspace / f"{name}_of_skipping" / "model" / "model.safetensors")
        runs.append((result.metrics, weights))
    (control, wanted), (metrics, weights) = runs
    skipped = [row["responses/skipped"] for row in metrics]
    assert len(control) == 3 and skipped[1] == PROMPTS * RESPONSES and 0 < skipped[0] + skipped[2] < 2 * skipped[1]
    assert control[0]["actor_grad_norm"] > MAX_NORM  # it is that before the clip
    for row, other in zip(metrics, control, strict=True):
        assert row["actor_lr"] == other["actor_lr"] > 0 and row["actor_grad_norm"] == other["actor_grad_norm"]
        assert row["responses/trained"] == PROMPTS * RESPONSES - row["responses/skipped"]
    before = load_file(workspace / "model" / "model.safetensors")
    assert all(torch.equal(weight, wanted[name]) for name, weight in weights.items())
    assert any(not torch.equal(weight, before[name]) for name, weight in weights.items())
