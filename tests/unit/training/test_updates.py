"""The loop over micro-batches: gradients, optimizer steps and metrics, against plain means over the batch.

OpenRLHF's ranks are threads here. The model has three weights; DeepSpeed's part, which adds the gradients of a step's
micro-batches and averages them over micro-batches and ranks, is written out.
"""

import itertools
import math
import operator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from openrlhf.models.loss import PolicyLoss, ValueLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from ranks import Ranks, arguments

from bapo_openrlhf.adapt.batch import Skipped
from bapo_openrlhf.training.worker import updates
from bapo_openrlhf.training.worker.loss_parts import FirstRatio
from bapo_openrlhf.training.worker.updates import Means, WholeBatchActorTrainer, WholeBatchCriticTrainer
from bapo_openrlhf.training.worker.whole_batch import WholeBatchReplayBuffer

CLIP, COEF, ENTROPY, AUX, VALUE_CLIP = 0.2, 0.3, 0.1, 0.5, 0.2


def sample(generator: torch.Generator, length: int, tokens: int) -> Experience:
    """A sample of `length` tokens, the last `tokens` of them generated. `sequences` are numbers of its own."""

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.double)

    fields = ("action_log_probs", "base_action_log_probs", "advantages", "values", "returns")
    return Experience(
        sequences=draw(length),
        attention_mask=torch.ones(length, dtype=torch.long),
        action_mask=torch.tensor([0] * (length - 1 - tokens) + [1] * tokens),
        **{name: 0.3 * draw(length - 1) for name in fields},
        total_length=torch.tensor(length),
        response_length=torch.tensor(float(tokens)),
        rewards=torch.tensor(7.0),
        info={"reward": draw(1)[0].float()},
    )


class Model:
    """Outputs of position t from token t + 1, which is a number; a balance of experts that knows no mask."""

    is_vlm = False

    def __init__(self, weight):
        self.weight = weight

    def features(self, token):
        return torch.stack([token, token.square(), token.cos()], -1) @ self.weight

    def outputs(self, sequences):
        return self.features(sequences[..., 1:]).sin()

    def balance(self, sequences):
        return self.features(sequences[..., 0]).cos()

    def __call__(self, sequences, action_mask, **_):
        output = self.outputs(sequences)
        entropy = torch.cat([torch.full_like(output[:, :1], 9.0), output.square()], 1)
        return output, SimpleNamespace(entropy=entropy, aux_loss=self.balance(sequences).mean())


class Engine:
    """Adds up the gradients of an optimizer step."""

    skipped_steps = 7  # before the checkpoint that the run continues from

    def __init__(self, weight, accumulated):
        self.weight, self.accumulated = weight, accumulated
        self.steps, self.sum = [], 0.0

    def parameters(self):
        return [torch.nn.Parameter(torch.ones(2))]

    def set_gradient_accumulation_boundary(self, closes):
        self.closes = closes

    def backward(self, loss):
        self.sum = self.sum + torch.autograd.grad(loss / self.accumulated, self.weight)[0]

    def step(self):
        if self.closes:
            self.steps.append(self.sum)
            self.sum = 0.0

    def get_global_grad_norm(self):
        return torch.tensor(float(len(self.steps)))


class CriticEngine(Engine):
    """A critic is its own engine."""

    def __call__(self, sequences, action_mask, **others):
        return Model(self.weight)(sequences, action_mask, **others)


def trainer(kind, samples, total, filler, strategy, *, size, accumulated, by_sample=False, weight=None):
    """A trainer of one rank, as OpenRLHF's constructor would leave it."""
    subject = object.__new__(kind)
    args = strategy.args
    args.actor = SimpleNamespace(entropy_coef=ENTROPY, aux_loss_coef=AUX)
    args.algo = SimpleNamespace(
        kl=SimpleNamespace(use_loss=True, init_coef=COEF, estimator="k3", unbiased_gradient=False)
    )
    subject.strategy, subject.args, subject.max_epochs, subject.dataloader_pin_memory = strategy, args, 1, False
    strategy.accumulated_gradient = accumulated
    strategy.backward = lambda loss, engine, _: engine.backward(loss)
    strategy.optimizer_step = lambda _, engine, __: engine.step()
    subject.replay_buffer = WholeBatchReplayBuffer(size)
    buffer = subject.replay_buffer
    buffer.items, buffer.total, buffer.filler = list(samples), total, filler
    subject.aux_loss = True
    scheduler = SimpleNamespace(get_last_lr=lambda: [0.1])
    accumulated = 1 if args.train.dynamic_batch_enable else accumulated
    if kind is WholeBatchActorTrainer:
        subject.actor, subject.actor_scheduler = Model(weight), scheduler
        subject.actor.model, subject.ema_model = Engine(weight, accumulated), None
        subject.actor_loss_fn = PolicyLoss(CLIP, CLIP, token_level_loss=not by_sample)
    else:
        subject.critic = CriticEngine(weight, accumulated)
        subject.critic_scheduler, subject.critic_loss_fn = scheduler, ValueLoss(VALUE_CLIP)
    return subject


def by_step(plan, values):
    """What belongs to each micro-batch of a plan, by optimizer step."""
    result = [[]]
    for part, value in zip(plan, values, strict=True):
        result[-1].append(value)
        result += [[]] if part.closes else []
    return result[:-1]


class Update:
    """One update of a random batch on `ranks` ranks, and the samples of each of its optimizer steps.

    Every `shown`-th sample is a demonstration. A share of the samples is `silent`: they have no advantage, and they are
    skipped if it `skips`. `first_ratio` is the limit of the first ratio. The trainer of each rank gets the
    `attributes`.
    """

    def __init__(
        self, kind, total, ranks, size, accumulated, seed, *, tokens=None, by_sample=False, shown=None, silent=None,
        skips=True, veto=None, first_ratio=None, weight=None, **attributes,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        lengths = torch.randint(3, 9, (total,), generator=generator).tolist()
        self.samples = [sample(generator, length, 1 + number % (length - 1)) for number, length in enumerate(lengths)]
        filler = sample(generator, 4, 0)
        filler.info["reward"] = torch.tensor(math.nan)
        for number, one in enumerate([*self.samples, filler] if shown else []):
            mark = one.action_mask.bool() if number % shown == 0 else torch.tensor(False)
            one.rollout_log_probs = (one.action_log_probs + 0.1 * number).masked_fill(mark, math.nan)
        self.weight = torch.randn(3, dtype=torch.double, requires_grad=True) if weight is None else weight
        self.window = ranks * size * accumulated
        items = list(self.samples)
        for place in torch.nonzero(torch.rand(total, generator=generator) < (silent or 0.0)).flatten().tolist():
            one = self.samples[place]
            one.advantages.zero_()
            items[place] = Skipped(place, len(one.sequences), int(one.action_mask.sum())) if skips else one
        self.passed = [one for one in items if not isinstance(one, Skipped)]
        group, flags = Ranks(ranks), arguments(self.window, tokens, skips=skips and silent is not None)
        flags.adapt.veto_ratio = veto
        self.trainers = [
            trainer(kind, items[rank::ranks], total, filler, group.strategy(flags),
                    size=size, accumulated=accumulated, by_sample=by_sample, weight=self.weight)
            for rank in range(ranks)
        ]  # fmt: skip
        # By rank: the samples of each micro-batch that is drawn; plan of each that is trained on, and if it is real.
        self.drawn, self.seen = ([[] for _ in range(ranks)] for _ in range(2))
        for subject, drawn, seen in zip(self.trainers, self.drawn, self.seen, strict=True):
            vars(subject).update(attributes)
            subject.first_ratio = first_ratio and FirstRatio(first_ratio)
            self.watch(subject, drawn, seen)
        arguments_of_loss = (COEF,) if kind is WholeBatchActorTrainer else ()
        self.metrics = group.run(lambda rank: self.trainers[rank].ppo_train(*arguments_of_loss))

    def watch(self, subject, drawn, seen):
        buffer, draw, train = subject.replay_buffer, subject.replay_buffer.draw, subject.train_micro_batch

        def watched_draw(items):
            real = [item for item in items if item is not buffer.filler]
            drawn.append([self.samples[item.place] if isinstance(item, Skipped) else item for item in real])
            return draw(items)

        def watched_train(experience, part, *rest):
            seen.append((part.plan, bool(experience.action_mask.any())))
            train(experience, part, *rest)

        buffer.draw, subject.train_micro_batch = watched_draw, watched_train

    def windows(self):
        """For each optimizer step of a use, the samples of each micro-batch of all ranks, also those skipped."""
        plans = [subject.replay_buffer.plan for subject in self.trainers]
        of_ranks = [by_step(plan, drawn[: len(plan)]) for plan, drawn in zip(plans, self.drawn, strict=True)]
        return [[part for part in itertools.chain(*parts) if part] for parts in zip(*of_ranks, strict=True)]

    def steps(self):
        """For each optimizer step of a use, its samples."""
        return [[*itertools.chain(*window)] for window in self.windows()]


def of_tokens(samples, value, *rest):
    """The numbers `value(sample, *rest)` of the generated tokens of samples, by sample."""
    return [value(one, *rest)[one.action_mask.bool()] for one in samples]


def surrogate(one, weight):
    """PPO's clipped loss of each token."""
    ratio = (Model(weight).outputs(one.sequences) - one.action_log_probs).exp()
    return -torch.minimum(ratio * one.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * one.advantages)


def moved(one, weight):
    """How far the log-probs are below those of the behaviour policy."""
    return one.action_log_probs - Model(weight).outputs(one.sequences)


def entropy(one, weight):
    return Model(weight).outputs(one.sequences).square()


def k3(one, weight):
    difference = one.base_action_log_probs - Model(weight).outputs(one.sequences)
    return difference.exp() - 1 - difference


def squared_error(one, weight):
    values = Model(weight).outputs(one.sequences)
    near = one.values + (values - one.values).clamp(-VALUE_CLIP, VALUE_CLIP)
    return 0.5 * torch.maximum((near - one.returns).square(), (values - one.returns).square())


def balance(samples, weight):
    return AUX * torch.stack([Model(weight).balance(one.sequences) for one in samples]).mean()


def mean(numbers, by_sample=False):
    return torch.stack([one.mean() for one in numbers]).mean() if by_sample else torch.cat(numbers).mean()


SHAPES = {
    "total": st.integers(1, 30),
    "ranks": st.integers(1, 3),
    "size": st.integers(1, 4),
    "accumulated": st.integers(1, 3),
    "seed": st.integers(0, 999),
    "tokens": st.sampled_from([None, 8, 20]),
}
UNHURRIED = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)


def assert_gradients(update, loss, steps=None, weights=None):
    """The gradient of each optimizer step, averaged over the ranks, is that of `loss(its samples, the weights)`."""
    engines = [getattr(subject, "critic", None) or subject.actor.model for subject in update.trainers]
    gradients = [torch.stack(parts).mean(0) for parts in zip(*(engine.steps for engine in engines), strict=True)]
    steps = steps or update.steps()
    weights = weights or [update.weight] * len(steps)
    for actual, samples, weight in zip(gradients, steps, weights, strict=True):
        assert torch.allclose(actual, torch.autograd.grad(loss(samples, weight), weight)[0], rtol=1e-5, atol=1e-7)


@UNHURRIED
@given(**SHAPES, by_sample=st.booleans())
@example(total=1, ranks=2, size=1, accumulated=1, seed=0, tokens=None, by_sample=True)  # one rank has only a filler
def test_the_actors_gradient_is_that_of_the_mean_over_each_optimizer_step(by_sample, **shape):
    update = Update(WholeBatchActorTrainer, **shape, by_sample=by_sample)
    assert sorted(map(id, itertools.chain(*update.steps()))) == sorted(map(id, update.samples))

    def loss(samples, weight):
        policy = mean(of_tokens(samples, surrogate, weight), by_sample) + COEF * mean(of_tokens(samples, k3, weight))
        return policy - ENTROPY * mean(of_tokens(samples, entropy, weight)) + balance(samples, weight)

    assert_gradients(update, loss)


def after_veto(one, weight, limit):
    """PPO's clipped loss of each token, and which of them have left: all below 0 after one that tripped."""
    ratios = (Model(weight).outputs(one.sequences) - one.action_log_probs).exp().tolist()
    mask, advantages = one.action_mask.tolist(), one.advantages.tolist()
    tripped, leaves = False, []
    for ratio, generated, advantage in zip(ratios, mask, advantages, strict=True):
        leaves.append(bool(generated) and advantage < 0 and tripped)
        tripped = tripped or (bool(generated) and advantage < 0 and ratio < limit)
    return surrogate(one, weight) * ~torch.tensor(leaves), torch.tensor(leaves)


def loss_after_veto(limit):
    """Tokens that have left count in the mean over tokens."""

    def loss(samples, weight):
        policy = of_tokens(samples, lambda one: after_veto(one, weight, limit)[0] + COEF * k3(one, weight))
        return mean(policy) - ENTROPY * mean(of_tokens(samples, entropy, weight)) + balance(samples, weight)

    return loss


@UNHURRIED
@given(**SHAPES, limit=st.sampled_from([0.5, 0.8, 1.1]))
def test_the_gradient_after_a_veto(limit, **shape):
    update = Update(WholeBatchActorTrainer, **shape, veto=limit)
    assert_gradients(update, loss_after_veto(limit))
    left = torch.cat(of_tokens(update.samples, lambda one: after_veto(one, update.weight.detach(), limit)[1]))
    for metrics in update.metrics:
        assert metrics["importance/vetoed_share"] == pytest.approx(float(left.double().mean()), abs=1e-6)


def test_the_veto_is_by_the_ratios_of_each_update(monkeypatch):
    """The weights move between the two uses of a batch, and so do the tokens that leave."""
    weights, step = [], Engine.step

    def moving(engine):
        weights.append(engine.weight.detach().clone().requires_grad_())
        step(engine)
        engine.weight.data.add_(torch.tensor([0.5, -0.4, 0.3]))

    monkeypatch.setattr(Engine, "step", moving)
    update = Update(WholeBatchActorTrainer, 6, 1, 6, 1, seed=3, veto=0.8, max_epochs=2)
    assert_gradients(update, loss_after_veto(0.8), [update.samples] * 2, weights)
    first, second = ([after_veto(one, weight, 0.8)[1].tolist() for one in update.samples] for weight in weights)
    assert first != second


@pytest.mark.parametrize("trips", [0, 4, 5, 99])
def test_a_gate_ends_the_uses_of_a_batch(monkeypatch, trips):
    """Three uses of two optimizer steps each. At the energy `trips`, the optimizer is left out, and all steps after."""
    energies, calls, left_out = itertools.count(1), [], []

    @contextmanager
    def optimizer_left_out(engine):
        before = len(engine.steps)
        yield
        left_out.append((before, len(engine.steps)))

    monkeypatch.setattr(Engine, "module", None, raising=False)
    monkeypatch.setattr(updates, "head_energy", lambda module: float(next(energies)))
    monkeypatch.setattr(updates, "optimizer_left_out", optimizer_left_out)
    gate = SimpleNamespace(trips=lambda energy, use: calls.append((energy, use)) or energy == trips)
    update = Update(WholeBatchActorTrainer, 6, 1, 3, 1, seed=3, max_epochs=3, gate=gate)
    (metrics,), made = update.metrics, min(trips, 6) if trips else 6
    assert calls == [(n, (n + 1) // 2) for n in range(1, made + 1)]
    assert left_out == [(trips - 1, trips)] * (trips in range(1, 7))
    assert len(update.trainers[0].engine.steps) == made
    assert metrics["reuse/tripped_share"] == pytest.approx((1 / made) if trips in range(1, 7) else 0)
    assert metrics["reuse/head_energy"] == pytest.approx((made + 1) / 2)


@UNHURRIED
@given(**SHAPES, by_sample=st.booleans(), silent=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]))
def test_skipped_samples_only_count_where_a_step_is_divided(by_sample, silent, **shape):
    """The policy loss is that of all samples. Of KL, entropy and the balance of experts their share is missing."""
    update = Update(WholeBatchActorTrainer, **shape, by_sample=by_sample, silent=silent)
    steps, passed = update.steps(), set(map(id, update.passed))
    assert sorted(map(id, itertools.chain(*steps))) == sorted(map(id, update.samples))
    assert list(map(len, steps))[:-1] == [update.window] * (len(steps) - 1)

    def of(samples, *value):
        return [numbers * (id(one) in passed) for one, numbers in zip(samples, of_tokens(samples, *value), strict=True)]

    def loss(samples, weight):
        policy = mean(of_tokens(samples, surrogate, weight), by_sample) + COEF * mean(of(samples, k3, weight))
        experts = [Model(weight).balance(one.sequences) * (id(one) in passed) for one in samples]
        return policy - ENTROPY * mean(of(samples, entropy, weight)) + AUX * torch.stack(experts).mean()

    assert_gradients(update, loss, steps)
    weight = update.weight.detach()
    tokens = [sum(int(one.action_mask.sum()) for one in samples) for samples in steps]
    losses = [float(mean(of_tokens(samples, surrogate, weight), by_sample)) for samples in steps]
    wanted = {"policy_loss": sum(map(operator.mul, tokens, losses)) / sum(tokens)}
    if update.passed:
        values = {"kl": k3, "entropy_loss": entropy, "ppo_kl": moved}
        wanted |= {name: float(mean(of_tokens(update.passed, value, weight))) for name, value in values.items()}
    for metrics in update.metrics:
        assert all(map(math.isfinite, metrics.values())) and metrics["actor_lr"] == 0.1
        assert wanted == pytest.approx({name: metrics[name] for name in wanted}, rel=1e-5, abs=1e-6)
        for name in ("kl", "entropy_loss", "ppo_kl", "response_length"):
            assert (name in metrics) == bool(update.passed)


@UNHURRIED
@given(**SHAPES, silent=st.sampled_from([0.3, 0.7, 0.95, 1.0]))
def test_only_micro_batches_with_samples_that_are_not_skipped_pass_the_model(silent, **shape):
    """A rank with fewer of them has fillers, and so has a step without any: one filler on each rank."""
    update = Update(WholeBatchActorTrainer, **shape, silent=silent)
    kept, of_ranks = set(map(id, update.passed)), []
    for subject, seen, drawn in zip(update.trainers, update.seen, update.drawn, strict=True):
        real = by_step(subject.replay_buffer.plan, [any(id(one) in kept for one in members) for members in drawn])
        made = by_step(*zip(*seen, strict=True))
        assert list(map(sum, made)) == list(map(sum, real))
        of_ranks.append((list(map(sum, real)), list(map(len, made))))
    most = [max(1, *counts) for counts in zip([1] * len(of_ranks[0][0]), *(real for real, _ in of_ranks), strict=True)]
    assert all(made == most for _, made in of_ranks)


@pytest.mark.parametrize("by_sample", [False, True])
def test_skipping_changes_no_bit_of_the_weights(monkeypatch, by_sample):
    """One rank, micro-batches of one sample, shuffled; AdamW, clipped gradients. The second update skips everything."""
    made, step = [], Engine.step
    for name in ("COEF", "ENTROPY", "AUX"):
        monkeypatch.setitem(globals(), name, 0.0)
    for skips in (False, True):
        weight, norms = torch.ones(3, dtype=torch.double, requires_grad=True), []
        optimizer = torch.optim.AdamW([weight], lr=0.1)

        def stepping(engine, weight=weight, norms=norms, optimizer=optimizer):
            step(engine)
            if engine.closes:
                weight.grad = engine.steps[-1].clone()
                norms.append(float(torch.nn.utils.clip_grad_norm_([weight], 0.01)))
                optimizer.step()

        monkeypatch.setattr(Engine, "step", stepping)
        for seed, silent in enumerate((0.4, 1.0, 0.5)):  # steps of 4, 4 and 3 samples
            Update(WholeBatchActorTrainer, 11, 1, 1, 4, seed, by_sample=by_sample, silent=silent, skips=skips,
                   weight=weight)  # fmt: skip
        made.append((norms, weight.tolist()))
    assert made[0] == made[1] and weight.tolist() != [1.0] * 3
    assert norms[3:6] == [0.0] * 3 and max(norms) > 0.01


def shown_loss(one, weight, cross_entropy):
    """The loss of each token of a demonstration."""
    log_probs = Model(weight).outputs(one.sequences)
    return -log_probs if cross_entropy else -log_probs.exp() / (log_probs.exp() + 0.1) * one.advantages


@UNHURRIED
@given(**SHAPES, cross_entropy=st.booleans(), shown=st.integers(1, 3))
def test_the_gradient_with_demonstrations(cross_entropy, shown, **shape):
    """Tokens of both kinds are averaged together. Only responses have a clip and a KL. Cross-entropy has no entropy.

    Otherwise the entropy is that of all tokens, as in the code of LUFFY's authors.
    """
    update = Update(WholeBatchActorTrainer, **shape, shown=shown, cross_entropy=cross_entropy)

    def is_shown(one):
        return bool(one.rollout_log_probs.isnan().any())

    def policy_losses(samples, weight, own_loss):
        losses = of_tokens(filter(is_shown, samples), shown_loss, weight, cross_entropy)
        return losses + of_tokens(itertools.filterfalse(is_shown, samples), own_loss)

    def loss(samples, weight):
        losses = policy_losses(samples, weight, lambda one: surrogate(one, weight) + COEF * k3(one, weight))
        entropies = mean(of_tokens(samples, entropy, weight))
        return mean(losses) + balance(samples, weight) - (0.0 if cross_entropy else ENTROPY * entropies)

    assert_gradients(update, loss)
    own, weight = [one for one in update.samples if not is_shown(one)], update.weight.detach()
    wanted = {"ppo_kl": mean(of_tokens(own, moved, weight))} if own else {}
    if cross_entropy:
        wanted["policy_loss"] = mean(policy_losses(update.samples, weight, lambda one: surrogate(one, weight)))
    for metrics in update.metrics:  # those of responses are of them only, and missing if there are none
        assert all(map(math.isfinite, metrics.values()))
        assert ("ppo_kl" in metrics) == ("response_length" in metrics) == bool(own)
        for name, value in wanted.items():
            assert metrics[name] == pytest.approx(float(value), rel=1e-5, abs=1e-6)


def test_a_demonstration_is_no_filtered_response():
    """Of three responses, whose weights are exp(-0.1), exp(-0.3) and exp(-0.5), one is below the threshold."""
    correction = {"is_correction_level": "seq", "is_correction_threshold": (math.exp(-0.4), 5.0)}
    loss = PolicyLoss(CLIP, CLIP, **correction)
    update = Update(WholeBatchActorTrainer, 6, 1, 6, 1, seed=3, shown=2, actor_loss_fn=loss)
    assert update.metrics[0]["is_filter_ratio"] == pytest.approx(1 / 3)
    update = Update(WholeBatchActorTrainer, 2, 1, 1, 2, seed=3, shown=2, actor_loss_fn=loss)
    assert update.metrics[0]["is_filter_ratio"] == 0  # one micro-batch has only a demonstration


@UNHURRIED
@given(**SHAPES)
def test_the_actors_metrics(**shape):
    """Means over tokens. A loss is divided by the tokens of an average micro-batch of its own optimizer step."""
    update = Update(WholeBatchActorTrainer, **shape)
    weight, windows = update.weight.detach(), update.windows()
    total = sum(int(one.action_mask.sum()) for one in update.samples)
    wanted = {"policy_loss": 0.0, "kl": 0.0}
    for window in windows:
        tokens = [sum(int(one.action_mask.sum()) for one in part) for part in window]
        for count, part in zip(tokens, window, strict=True):
            for name, loss in (("policy_loss", surrogate), ("kl", k3)):
                summed = sum(numbers.sum() for numbers in of_tokens(part, loss, weight))
                wanted[name] += float(summed) / (sum(tokens) / len(tokens)) * count / total
    wanted["ppo_kl"] = float(mean(of_tokens(update.samples, moved, weight)))
    wanted["reward"] = sum(float(one.info["reward"]) for one in update.samples) / len(update.samples)
    wanted["response_length"] = sum(float(one.response_length) for one in update.samples) / len(update.samples)
    assert "rewards" not in update.metrics[0]
    for metrics in update.metrics:
        assert {name: metrics[name] for name in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-6)
        assert all(map(math.isfinite, metrics.values()))
        assert metrics["actor_lr"] == 0.1 and metrics["actor_grad_norm"] == len(windows)


@UNHURRIED
@given(**SHAPES)
def test_the_first_ratio_is_that_of_the_first_optimizer_step(**shape):
    """The mean of |log ratio| over its tokens on all ranks. It is looked at once, in the first use of the batch."""
    update = Update(WholeBatchActorTrainer, **shape, max_epochs=2, first_ratio=1e6)
    weight, (first, *_) = update.weight.detach(), update.windows()
    wanted = torch.cat(of_tokens(itertools.chain(*first), moved, weight)).abs().mean()
    for metrics, subject in zip(update.metrics, update.trainers, strict=True):
        assert metrics["first_ratio"] == pytest.approx(float(wanted), rel=1e-5)
        assert subject.first_ratio is None


def test_demonstrations_and_fine_tuning_have_no_first_ratio():
    """A demonstration has no behaviour policy, and the loss of fine-tuning no ratio."""
    shape = {"total": 6, "ranks": 1, "size": 2, "accumulated": 3, "seed": 3}
    update = Update(WholeBatchActorTrainer, **shape, shown=2, first_ratio=1e6)
    wanted = torch.cat(of_tokens(update.samples[1::2], moved, update.weight.detach())).abs().mean()
    assert update.metrics[0]["first_ratio"] == pytest.approx(float(wanted), rel=1e-5)
    tuned = Update(WholeBatchActorTrainer, **shape, shown=2, cross_entropy=True, first_ratio=1e6)
    assert "first_ratio" not in tuned.metrics[0] and tuned.trainers[0].first_ratio.require() == (0, 0)


@pytest.fixture
def closes(monkeypatch):
    """Of each micro-batch after which the engine is told to step, whether the optimizer does."""
    result = []
    monkeypatch.setattr(Engine, "step", lambda engine: result.append(engine.closes))
    return result


def test_a_first_ratio_that_is_not_1_stops_the_run_before_its_optimizer_step(closes):
    with pytest.raises(RuntimeError, match=r"\|log ratio\| of 17 tokens is 0\.\d+, and rounding explains 0\.0001"):
        Update(WholeBatchActorTrainer, 6, 1, 2, 3, seed=3, first_ratio=1e-4)
    assert closes == [False, False]


@pytest.mark.parametrize(
    ("tokens", "moved", "ends"), [(10, 0.99, False), (10, 1.01, True), (2000, 0.0099, False), (2000, 0.0101, True)]
)
def test_missing_tokens_have_the_ratio_1(tokens, moved, ends):
    first = FirstRatio(0.01)
    mask = torch.ones(1, tokens)
    first.add(torch.full((1, tokens), moved), Experience(action_log_probs=torch.zeros(1, tokens), action_mask=mask))
    with pytest.raises(RuntimeError) if ends else nullcontext():
        assert first.require() == pytest.approx((moved, tokens), rel=1e-5)


@UNHURRIED
@given(**SHAPES)
def test_the_critics_gradient_and_metrics(**shape):
    """The mean loss of each optimizer step, and the mean value of each micro-batch, each counted once a sample."""
    update = Update(WholeBatchCriticTrainer, **shape)
    assert_gradients(update, lambda samples, w: mean(of_tokens(samples, squared_error, w)) + balance(samples, w))
    weight, loss, values, windows = update.weight.detach(), 0.0, 0.0, update.windows()
    for window in windows:
        samples = [*itertools.chain(*window)]
        loss += len(samples) * float(mean(of_tokens(samples, squared_error, weight)))
        for part in window:
            values += len(part) * float(mean(of_tokens(part, lambda one: Model(weight).outputs(one.sequences))))
    steps = len(windows)
    wanted = {"critic_loss": loss / len(update.samples), "values": values / len(update.samples), "critic_lr": 0.1,
              "critic_grad_norm": (steps + 1) / 2}  # fmt: skip
    for metrics in update.metrics:
        assert metrics == pytest.approx(wanted, rel=1e-5, abs=1e-6)


# Of the estimators of the KL divergence, with r = log pi - log pi_ref: value, and derivative in log pi.
ESTIMATORS = {
    "k1": (lambda r: r, lambda r: 1.0),
    "k2": (lambda r: r**2 / 2, lambda r: r),
    "k3": (lambda r: math.exp(-r) - 1 + r, lambda r: 1 - math.exp(-r)),
}


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("estimator", list(ESTIMATORS))
def test_the_kl_loss_is_that_of_the_flags(estimator, unbiased, coefficient):
    """An unbiased gradient is pi/pi_old r, whatever the estimator. Without a coefficient there is no reference."""
    subject = object.__new__(WholeBatchActorTrainer)
    kl = SimpleNamespace(init_coef=coefficient, estimator=estimator, unbiased_gradient=unbiased)
    subject.args = SimpleNamespace(algo=SimpleNamespace(kl=kl))
    log_probs = torch.tensor([[-1.0, -0.5, -9.0]], requires_grad=True)
    experience = Experience(
        base_action_log_probs=torch.tensor([[-1.3, -0.1, 0.0]]) if coefficient else None,
        action_log_probs=torch.tensor([[-1.1, -0.4, 0.0]]),
        action_mask=torch.tensor([[1, 1, 0]]),
    )
    part = SimpleNamespace(normalisers={"dp_size": 1, "batch_num_tokens": 2.0, "global_batch_size": 1.0})
    loss, difference = subject._kl(log_probs, experience, part)
    if not coefficient:
        assert loss == difference == 0
        return
    loss.backward()
    value, slope = ESTIMATORS[estimator]
    ratios, weights = (0.3, -0.4), (math.exp(0.1), math.exp(-0.1))
    assert loss.item() == pytest.approx(sum(map(value, ratios)) / 2, rel=1e-5)
    assert difference.item() == pytest.approx(-0.05, rel=1e-5)
    slopes = [w * r if unbiased else slope(r) for w, r in zip(weights, ratios, strict=True)]
    assert log_probs.grad[0].tolist() == pytest.approx([slopes[0] / 2, slopes[1] / 2, 0.0], rel=1e-5)


@pytest.mark.parametrize("kind", [WholeBatchActorTrainer, WholeBatchCriticTrainer])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_before_its_optimizer_step(monkeypatch, closes, kind, value):
    loss, factors = kind.loss, iter([1.0, 2.0, value, 1.0])
    monkeypatch.setattr(kind, "loss", lambda *given: loss(*given) * next(factors))
    with pytest.raises(FloatingPointError, match=f"the loss of {kind.__name__} is -?{value}"):
        Update(kind, 4, 1, 1, 2, seed=3)
    assert closes == [False, True, False]


def parameter_of(*values, part=None, numel=None, trained=True):
    """A parameter. With a part, ZeRO-3 has divided it among two ranks, and the second one has only the part."""
    parameter = torch.nn.Parameter(torch.tensor(values), requires_grad=trained)
    if part is not None:
        parameter.ds_tensor, parameter.ds_numel = torch.tensor(part), numel or 2 * len(part)
        parameter.ds_process_group = None
    return parameter


@pytest.mark.parametrize("kind", [WholeBatchActorTrainer, WholeBatchCriticTrainer])
@pytest.mark.parametrize(("skipped", "parameters", "end"), [
    (0, [parameter_of(1.0, -2.0), parameter_of(part=[0.5])], None),
    (0, [parameter_of(1.0), parameter_of(math.nan, trained=False)], None),
    (1, [parameter_of(1.0)], "it was not applied"),
    (1, [parameter_of(1.0, math.nan)], "the weights are not"),
    (0, [parameter_of(1.0), parameter_of(1.0, math.nan)], "the weights are not"),
    (0, [parameter_of(1.0), parameter_of(part=[1.0, -math.inf])], "the weights are not"),
    (0, [parameter_of(1.0), parameter_of(part=[1.0, -math.inf], numel=3)], None),  # the last one fills up
    (0, [parameter_of(1.0), parameter_of(part=[math.nan, math.nan], numel=1)], None),
])  # fmt: skip
def test_a_gradient_that_is_not_finite_stops_the_run(monkeypatch, kind, skipped, parameters, end):
    """DeepSpeed's norm of it is finite (tests/stack/test_not_finite.py)."""

    def step(engine):
        engine.skipped_steps += skipped

    monkeypatch.setattr(Engine, "step", step)
    monkeypatch.setattr(Engine, "parameters", lambda engine: parameters)
    monkeypatch.setattr(Ranks, "get_rank", lambda self, group: 1, raising=False)
    with pytest.raises(FloatingPointError, match=f"{kind.__name__} .*{end}") if end else nullcontext():
        Update(kind, 1, 1, 1, 1, seed=1)


@pytest.mark.parametrize(("parallel", "tokens", "shuffles"), [(1, None, True), (2, None, False), (1, 64, False)])
def test_samples_are_shuffled_unless_others_need_their_order(parallel, tokens, shuffles):
    subject = object.__new__(WholeBatchActorTrainer)
    subject.args = arguments(4, tokens)
    subject.args.ds.tensor_parallel_size = parallel
    assert subject._shuffles is shuffles


def test_weights_are_averaged_after_each_optimizer_step(monkeypatch):
    """Also those of which this rank has a part (ZeRO-3), and not those that are frozen."""
    monkeypatch.setattr(updates.dist, "get_rank", lambda group: 1)
    subject = object.__new__(WholeBatchActorTrainer)
    kinds = [parameter_of(2.0, 4.0), parameter_of(part=[3.0]), parameter_of(2.0, 4.0, trained=False)]
    means = [parameter_of(1.0, 1.0), parameter_of(part=[5.0]), parameter_of(1.0, 1.0)]
    subject.actor, subject.ema_model = (
        SimpleNamespace(parameters=lambda parameters=parameters: parameters) for parameters in (kinds, means)
    )
    subject.ema_beta = 0.75
    subject._average_weights()
    assert [means[0].tolist(), means[1].ds_tensor.tolist(), means[2].tolist()] == [[1.25, 1.75], [4.5], [1.0, 1.0]]
    subject._average_weights()
    assert means[0].tolist() == pytest.approx([1.4375, 2.3125])


def test_a_number_is_averaged_over_the_samples_that_have_it():
    """In `extra_logs`, nan is no number. A metric of the run itself that is nan stays so."""
    ranks, nan, generator = Ranks(2), math.nan, torch.Generator().manual_seed(0)
    numbers = [("a", [1.0, nan, nan, 4.0]), ("b", [nan] * 4), ("return", [1.0, nan, 2.0, 3.0])]

    def work(rank):
        samples = [sample(generator, 4, 2) for _ in range(5)]
        for place, one in enumerate(samples):
            one.info = {name: torch.tensor([*values, 0.0][place]) for name, values in numbers}
        strategy = ranks.strategy(arguments(4, None))
        subject = trainer(WholeBatchActorTrainer, samples[rank:4:2], 4, samples[4], strategy, size=2, accumulated=1)
        subject.means, subject._rates, subject._norms = Means(), [0.1], [1.0]
        return subject._metrics()

    for metrics in ranks.run(work):
        assert metrics["a"] == 2.5 and "b" not in metrics and math.isnan(metrics["return"])
