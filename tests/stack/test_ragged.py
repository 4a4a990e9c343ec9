"""Batches of 0 to 9 groups of 8 on one to three data-parallel ranks: each update is the one plain PyTorch makes.

The probe notes on every rank what each micro-batch held, the parameters after each optimizer step, and what the worker
reports. From these the updates are computed again: transformers' model, the formulas of plain_update.py, torch's AdamW.
"""

import json
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import plain_update
import pytest
import torch
from plain_update import Objective

pytestmark = pytest.mark.stack

HERE = Path(__file__).parent

# Groups with signal at each step. The batches have every number of groups from 0 to 9.
SIGNALS = (0, 1, 5, 6, 0, 0, 4, 6, 2, 0, 2)
SIZES = (0, 1, 6, 9, 3, 0, 4, 8, 5, 7, 2)
SIZES_OF_PAIRS = (0, 1, 6, 9, 6, 0, 4, 9, 8, 8, 2)  # with two responses a prompt, all groups with signal are replayed
PROMPTS, CAPACITY, EPOCHS = 6, 9, 2  # in groups: a rollout, a batch
VALUE_CLIP, MAX_NORM = 0.1, 1.5
# Adam moves each parameter by nearly the sign of its gradient, and that of a small one is noise in bf16. With an eps
# this large and no memory of earlier gradients, it moves them in proportion to this step's gradient.
EPS, BETAS, DECAY = 1.0, (0.0, 0.9), 0.005
# How far rounding to bf16 takes log-probs and values, and (relative) gradient norms and updates.
OUTPUT_ERROR, NORM_ERROR, CHANGE_ERROR = 0.02, 0.01, 0.03
RATES = {"actor": (0.05, 0.1, 0.0), "critic": (0.05, 0.3, 0.1)}  # learning rate, where it ends, share of warm-up


class Case(NamedTuple):
    """A run: the data-parallel ranks of its models, ZeRO's stage, and how its batches are divided."""

    name: str
    actors: int
    critics: int
    references: int
    stage: int
    micro: int  # samples of a micro-batch
    window: int  # samples of an optimizer step
    size: int = 8  # G
    tokens: int = 0  # of a micro-batch with dynamic batching; 0: without
    objective: Objective = Objective()
    scaled: bool = False  # whether the actor's learning rate has a factor (`--adapt.scale_learning_rate`)

    def ranks(self, model):
        return {"actor": self.actors, "critic": self.critics}[model]

    @property
    def sizes(self):
        return SIZES if self.size == 8 else SIZES_OF_PAIRS

    def windows(self, groups):
        """Samples of each optimizer step of an epoch."""
        samples = groups * self.size
        return [min(self.window, samples - start) for start in range(0, samples, self.window)]


def slow(name, *numbers, marks=pytest.mark.slow, **keywords):
    return pytest.param(Case(name, *numbers, **keywords), id=name, marks=marks)


# The first nine: each two of ranks, ZeRO's stage (at most 2, or 3) and micro-batch meet once.
CASES = [
    slow("1-zero2-micro1", 1, 1, 1, 2, 1, 24),
    slow("1-zero3-micro3-dual-clip", 1, 1, 1, 3, 3, 24, objective=Objective(dual=1.2)),
    slow("1-zero2-micro16-by-sample", 1, 1, 1, 2, 16, 32, objective=Objective(by_sample=True)),
    slow("2-zero3-micro1-gspo", 2, 2, 2, 3, 1, 24, objective=Objective(by_sequence=True, by_sample=True)),
    slow("2-zero1-micro3-kl", 2, 2, 2, 1, 3, 24, objective=Objective(kl=0.5)),
    slow("2-zero3-micro16-entropy", 2, 2, 2, 3, 16, 32, objective=Objective(entropy=0.2)),
    slow("3-zero2-micro1", 3, 3, 3, 2, 1, 24, scaled=True),
    slow("3-zero3-micro3-band", 3, 3, 3, 3, 3, 27, objective=Objective(band=(0.998, 1.002))),
    slow("3-zero2-micro16", 3, 3, 3, 2, 16, 48),
    slow("3-and-2-ranks", 3, 2, 1, 2, 3, 36, scaled=True, marks=()),  # in `make test`
    slow("2-and-3-ranks", 2, 3, 1, 3, 3, 36),
    slow("fewer-samples-than-ranks", 3, 3, 3, 3, 1, 3, size=2),
    slow("2-zero2-dynamic", 2, 2, 2, 2, 2, 24, tokens=40),
    slow("3-zero3-dynamic", 3, 3, 3, 3, 2, 24, tokens=40),
    slow("3-and-2-ranks-dynamic", 3, 2, 1, 2, 2, 36, tokens=40),
]


class Run(NamedTuple):
    """A finished run: its metrics, and `notes[model][update][rank]` as the probe wrote them."""

    case: Case
    metrics: list[dict]
    notes: dict[str, list[list[dict]]]
    model: Path

    @property
    def updated(self):
        return [row for row in self.metrics if not row.get("skipped_update")]


def flags_of(objective):
    flags = {
        "actor__eps_clip_low_high": (objective.low, objective.high), "algo__kl__init_coef": objective.kl,
        "actor__dual_clip": objective.dual, "actor__entropy_coef": objective.entropy,
    }  # fmt: skip
    if objective.by_sequence:
        flags["actor__policy_loss_type"] = "gspo"
    elif objective.by_sample:
        flags["actor__loss_agg_mode"] = "seq-mean-token-mean"
    if objective.band is not None:
        flags["algo__advantage__is_correction_level"] = "seq"
        flags["algo__advantage__is_correction_threshold"] = objective.band
    return flags


@pytest.fixture(scope="module", params=CASES)
def probe_run(request, train, workspace):
    case, name = request.param, f"ragged-{request.param.name}"
    folder = workspace / name
    folder.mkdir()
    rows = [{"input": f"{i}+{i % 7}=", "label": "0"} for i in range(PROMPTS * len(SIZES))]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = {"prompts": PROMPTS, "responses": case.size, "signals": SIGNALS}
    environment = {"PROBE_FOLDER": folder, "RAGGED_SCRIPT": json.dumps(script), "RAGGED_TOKENS": case.tokens}
    flags = flags_of(case.objective)
    for model, (rate, end, warmup) in RATES.items():
        of_model = {
            "num_gpus_per_node": case.ranks(model), "adam.lr": rate, "min_lr_ratio": end, "lr_warmup_ratio": warmup,
            "adam.eps": EPS, "adam.betas": BETAS, "adam.weight_decay": DECAY, "max_norm": MAX_NORM,
        }  # fmt: skip
        flags |= {f"{model}.{flag}": value for flag, value in of_model.items()}
    flags |= {  # The reward counts, so it has one process. OpenRLHF wants a pass of a rollout for every rank.
        "algorithm": "ba_ppo", "data__prompt_dataset": folder / "data.jsonl",
        "ref__num_gpus_per_node": case.references, "ds__zero_stage": case.stage, "critic__value_clip": VALUE_CLIP,
        "reward__remote_url": HERE / "ragged_reward.py", "verifier__processes": 1, "rollout__batch_size": PROMPTS,
        "rollout__n_samples_per_prompt": case.size, "rollout__micro_batch_size": 5 if case.size == 8 else 2,
        "adapt__scale_learning_rate": case.scaled or None, "adapt__batch_size": CAPACITY, "adapt__c2": "1/8",
        "adapt__c3": "1/2", "adapt__replay_steps": 1, "adapt__rollout_delay": 2, "adapt__reevaluate_every": 3,
        "adapt__max_reevaluated_prompts": CAPACITY, "train__batch_size": case.window,
        "train__micro_batch_size": case.micro, "train__max_epochs": EPOCHS,
    }  # fmt: skip
    environment = {name: str(value) for name, value in environment.items()}
    result = train(name, str(HERE / "probe.py"), "ragged", environment=environment, **flags)
    notes = {
        model: [
            [torch.load(folder / f"{model}-{rank}-{update}.pt") for rank in range(case.ranks(model))]
            for update in range(len(list(folder.glob(f"{model}-0-*.pt"))))
        ]
        for model in RATES
    }
    return Run(case, result.metrics, notes, workspace / "model")


@pytest.fixture(params=["actor", "critic"])
def model(request):
    return request.param


def is_filler(batch):
    return not batch["action_mask"].any()


def windows(updates):
    """(parameters before, micro-batches of all ranks, the last of rank 0) of each optimizer step, in order.

    Fillers are left out.
    """
    for ranks in updates:
        before, window = ranks[0]["before"], []
        for micro_batches in zip(*(rank["micro_batches"] for rank in ranks), strict=True):
            window += [batch for batch in micro_batches if not is_filler(batch)]
            if micro_batches[0]["stepped"]:
                yield before, window, micro_batches[0]
                before, window = micro_batches[0].get("after"), []
        assert not window  # no gradient is left for the next batch


def test_batches_are_as_ragged_as_planned(probe_run):
    names = [f"groups/{source}" for source in ("fresh", "reevaluated", "replayed")]
    sources = [[row[name] for name in names] for row in probe_run.metrics]
    assert tuple(map(sum, sources)) == probe_run.case.sizes and set(SIZES) == set(range(CAPACITY + 1))
    assert all(map(sum, zip(*sources, strict=True)))  # each of the three was trained on
    assert [row["groups/cut"] for row in probe_run.metrics] == [3 * (step == 3) for step in range(len(SIZES))]


def test_logits_are_those_of_response_tokens(probe_run, model):
    """Also under ZeRO-3, whose hooks make other objects of them. The numbers are the same if they are those of all."""
    assert all(rank["sliced"] for update in probe_run.notes[model] for rank in update)


def test_ranks_stay_together(probe_run, model):
    """All ranks step the optimizer after the same micro-batches, on whole optimizer steps until the last of a batch.

    Fillers stand in where a rank has a micro-batch less, and nowhere else.
    """
    case, steps, stood_in = probe_run.case, 0, 0
    for groups, update in zip(filter(None, case.sizes), probe_run.notes[model], strict=True):
        wanted = case.windows(groups) * EPOCHS
        steps += len(wanted)
        assert [sum(len(b["sequences"]) for b in window) for _, window, _ in windows([update])] == wanted
        shares = [len(rank["given"]) for rank in update]
        assert sum(shares) == groups * case.size and max(shares) - min(shares) <= 1
        for rank in update:
            assert [b["stepped"] for b in rank["micro_batches"]] == [b["stepped"] for b in update[0]["micro_batches"]]
            assert (rank["micro_steps"], rank["optimizer_steps"]) == (update[0]["micro_steps"], steps)
            if not case.tokens:
                parts, all_parts = (math.ceil(share / case.micro) for share in (len(rank["given"]), max(shares)))
                fillers = [is_filler(batch) for batch in rank["micro_batches"]]
                assert fillers == ([False] * parts + [True] * (all_parts - parts)) * EPOCHS
                stood_in += sum(fillers)
    assert stood_in or case.ranks(model) < 3 or case.micro > 3 or case.tokens


def test_every_sample_is_trained_on_once_an_epoch(probe_run, model):
    def rows(batch):
        """(tokens, advantages) of each sample, without padding."""
        lengths = batch["attention_mask"].sum(-1).tolist()
        fields = zip(batch["sequences"].tolist(), batch["advantages"].tolist(), lengths, strict=True)
        return [(tuple(tokens[:length]), tuple(advantages[: length - 1])) for tokens, advantages, length in fields]

    for update in probe_run.notes[model]:
        for rank in update:
            trained = Counter(row for batch in rank["micro_batches"] if not is_filler(batch) for row in rows(batch))
            given = Counter((tuple(tokens.tolist()), tuple(a.tolist())) for tokens, a in rank["given"])
            assert trained == given + given


def test_a_micro_batch_hardly_waits_for_a_gpu(probe_run, model):
    """A micro-batch reads one number: where the response tokens are. One that closes a step reads a few more.

    These are the loss, before the optimizer steps, and the gradient norm, which DeepSpeed reads. Under ZeRO stage 3
    DeepSpeed reads numbers of its own, about two for each parameter.
    """
    if probe_run.case.stage == 3:
        return
    for update in probe_run.notes[model]:
        for batch in (batch for rank in update for batch in rank["micro_batches"]):
            assert sum(batch["waits"].values()) <= (5 if batch["stepped"] else 1), batch["waits"]


def rate_after(model, steps, total):
    """Learning rate after so many optimizer steps of `total`: cosine after a linear warm-up."""
    rate, end, warmup = RATES[model]
    warmup = math.ceil(warmup * total)
    cosine = 0.5 * (1 + math.cos(math.pi * (steps - warmup) / (total - warmup)))
    return rate * (steps / warmup if steps < warmup else end + (1 - end) * cosine)


def test_empty_unions_skip_the_update(probe_run, model):
    """The row says so, the run goes on, and the parameters stay as they were, to the last bit."""
    assert len(probe_run.metrics) == len(SIZES)
    for groups, row in zip(probe_run.case.sizes, probe_run.metrics, strict=True):
        assert row.get("skipped_update", 0) == (groups == 0)
        assert ("policy_loss" in row) == ("critic_loss" in row) == (groups > 0)
    from transformers import AutoModelForCausalLM

    now = AutoModelForCausalLM.from_pretrained(probe_run.model, dtype=torch.float32).state_dict()
    for ranks in probe_run.notes[model]:
        before = ranks[0]["before"]
        shared = now.keys() & before.keys()  # at the start, the critic's head is not the model's
        assert len(shared) == len(now) - ("lm_head.weight" in now and model == "critic")
        assert all(torch.equal(now[name], before[name]) for name in shared)
        now = ranks[0]["micro_batches"][-1]["after"]


class Critic(torch.nn.Module):
    def __init__(self, folder):
        super().__init__()
        from transformers import AutoModel

        self.model = AutoModel.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
        self.score = torch.nn.Linear(self.model.config.hidden_size, 1, bias=False, dtype=torch.bfloat16)

    def forward(self, sequences, attention_mask):
        hidden = self.model(sequences, attention_mask=attention_mask).last_hidden_state
        return self.score(hidden)[..., 0].float()


def make_net(model, folder):
    if model == "critic":
        return Critic(folder)
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")


def critic_loss(net, batch, objective):
    values = net(batch["sequences"], batch["attention_mask"])[:, :-1]
    loss, held = plain_update.squared_error(batch, values, VALUE_CLIP)
    return plain_update.total(loss, batch["action_mask"]) / batch["action_mask"].sum(), values, held


def flat(parameters):
    return torch.cat([parameters[name].detach().flatten() for name in sorted(parameters)])


def test_updates_are_those_of_plain_pytorch(probe_run, model):
    """One AdamW step a window on the mean loss over all its samples, of all ranks: no more, no less, nothing left over.

    Each step starts from the run's own parameters, so that errors do not add up. The learning rate goes on with the
    steps that were taken: smaller batches advance it less.
    """
    case, objective = probe_run.case, probe_run.case.objective
    net, loss_of = make_net(model, probe_run.model), {"actor": plain_update.actor_loss, "critic": critic_loss}[model]
    start = probe_run.notes[model][0][0]["before"]
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    assert parameters.keys() == dict(net.named_parameters()).keys()
    decays = [p for name, p in parameters.items() if "norm" not in name]
    others = {"params": [p for name, p in parameters.items() if "norm" in name], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": decays, "weight_decay": DECAY}, others], betas=BETAS, eps=EPS)
    clipped, norms = [], []
    factors = [
        row["importance/learning_rate_factor"] if case.scaled and model == "actor" else 1.0
        for update, row in zip(probe_run.notes[model], probe_run.updated, strict=True)
        for _ in windows([update])
    ]
    for factor, (before, window, last) in zip(factors, windows(probe_run.notes[model]), strict=True):
        with torch.no_grad():
            for name, weight in net.named_parameters():
                weight.copy_(before[name])
                parameters[name].copy_(before[name])
                parameters[name].grad = torch.zeros_like(before[name])
        batch = plain_update.joined(window)
        loss, output, held = loss_of(net, batch, objective)
        used = batch["action_mask"] > 0
        assert (output - batch["output"])[used].abs().max() < OUTPUT_ERROR
        clipped += held[used].tolist()
        net.zero_grad()
        loss.backward()
        for name, weight in net.named_parameters():
            parameters[name].grad += weight.grad
        rate = rate_after(model, len(norms), len(SIZES) * len(case.windows(CAPACITY)) * EPOCHS)
        assert last["rate"] == pytest.approx(rate, rel=1e-6, abs=1e-12)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_NORM)))
        for group in optimizer.param_groups:
            group["lr"] = factor * last["rate"]
        optimizer.step()
        moved, wanted = flat(last["after"]) - flat(before), flat(parameters) - flat(before)
        assert last["norm"] == pytest.approx(norms[-1], rel=NORM_ERROR, abs=1e-6)  # a norm may be 0, but for rounding
        assert (moved - wanted).norm() <= CHANGE_ERROR * wanted.norm()
    assert min(norms) < MAX_NORM < max(norms) and any(clipped) and not all(clipped)


def test_all_ranks_report_what_the_record_has(probe_run, model):
    for update, row in zip(probe_run.notes[model], probe_run.updated, strict=True):
        for rank in update:
            rank["status"].pop("first_ratio", None)  # test_updates.py compares it
            assert {"actor": "policy_loss", "critic": "critic_loss"}[model] in rank["status"]
            assert {name: row[name] for name in rank["status"]} == pytest.approx(rank["status"])


def test_factor_is_that_of_the_weights_of_the_batch(probe_run):
    """The root of (sum w)^2 / (F sum w^2), with w = pi/alpha of a response; 1 if today's weights generated it.

    F is what the optimizer steps would hold if they were full.
    """
    if not probe_run.case.scaled:
        return
    net = make_net("actor", probe_run.model)
    factors = []
    for update, row in zip(probe_run.notes["actor"], probe_run.updated, strict=True):
        log_weights, steps = [], list(windows([update]))
        first_epoch = steps[: len(steps) // EPOCHS]
        with torch.no_grad():
            for name, weight in net.named_parameters():
                weight.copy_(update[0]["before"][name])
            for batch in (plain_update.joined(window) for _, window, _ in first_epoch):
                logits = net(batch["sequences"], attention_mask=batch["attention_mask"]).logits.float()
                log_probs = logits.log_softmax(-1)[:, :-1].gather(-1, batch["sequences"][:, 1:, None])[..., 0]
                moved = ((log_probs - batch["rollout_log_probs"]) * batch["action_mask"]).sum(-1)
                stored = (batch["action_log_probs"] == batch["rollout_log_probs"]) | (batch["action_mask"] == 0)
                log_weights += torch.where(stored.all(-1), moved, 0.0).tolist()
        weights = torch.tensor(log_weights).exp()
        full = min(len(first_epoch) * probe_run.case.window, CAPACITY * probe_run.case.size)
        factors.append(float(weights.sum() / (full * weights.square().sum()).sqrt()))
        assert row["importance/learning_rate_factor"] == pytest.approx(factors[-1], rel=OUTPUT_ERROR)
    assert min(factors) < 0.6 < 0.97 < max(factors)  # few responses, and a full batch of equal weights


def test_values_are_those_of_the_critic_before_the_update(probe_run):
    """Whatever ranks passed them: the first optimizer step of a batch finds the values that the batch was made with."""
    for update in probe_run.notes["critic"]:
        _, window, _ = next(windows([update]))
        for batch in window:
            assert ((batch["output"] - batch["values"]) * batch["action_mask"]).abs().max() < OUTPUT_ERROR
