"""Importance ratios, KL targets and advantages of a batch of three sources, and the joints they hang on: no Ray."""

from __future__ import annotations

import importlib.metadata
import math
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from bapo_openrlhf import cpu

cpu.prepare_environment()
cpu.install()

import ray  # noqa: E402
import torch  # noqa: E402
from openrlhf.trainer.ppo_utils.experience import Experience  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from openrlhf.trainer.ray import launcher  # noqa: E402

from bapo_openrlhf.arithmetic import BatchArithmetic  # noqa: E402
from bapo_openrlhf.errors import ConfigError  # noqa: E402
from bapo_openrlhf.integration import joints, openrlhf_cli  # noqa: E402
from bapo_openrlhf.integration.experience import AdaptedExperienceMaker, SampleOrigin, old_log_probs  # noqa: E402
from bapo_openrlhf.integration.rollout import checked_reward  # noqa: E402

EPS = 1e-6
# One row a sample: a whole turn, padding, two turns, one token.
MASKS = torch.tensor([[0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 1, 1], [0, 0, 0, 0, 1, 0]], dtype=torch.long)


def maker(estimator: str = "group_norm", *, size: int = 4, kl: float = 0.0, arithmetic=None, **changed):
    """An experience maker of these arguments, without models, workers or Ray."""
    args = SimpleNamespace(
        adapt=SimpleNamespace(eps=EPS, ratio="behaviour", kl_target="reference"),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False),
            kl=SimpleNamespace(use_loss=False, estimator="k1"),
        ),
        rollout=SimpleNamespace(n_samples_per_prompt=size),
        reward=SimpleNamespace(clip_range=(-10, 10)),
    )
    for name, value in changed.items():
        parent, _, key = name.rpartition("__")
        node = args
        for part in parent.split("__"):
            node = getattr(node, part)
        setattr(node, key, value)
    made = object.__new__(AdaptedExperienceMaker)
    made.args, made.strategy = args, SimpleNamespace(args=args)
    made.advantage_estimator = estimator
    made.kl_ctl = SimpleNamespace(value=kl)
    made.tokenizer = SimpleNamespace(pad_token_id=9)
    made.arithmetic, made.origins, made.log_ratios = arithmetic, (), np.zeros(0)
    return made


def split(
    rewards: list[float], parts: list[list[int]], *, seed: int = 0, kl: float = 0.0, **rows: torch.Tensor
) -> list[Experience]:
    """Experience of samples in micro-batches `parts`, each with its own mask and per-token numbers."""
    rng = torch.Generator().manual_seed(seed)
    kls = kl * torch.rand((len(rewards), MASKS.shape[1]), generator=rng)
    values = torch.randn((len(rewards), MASKS.shape[1]), generator=rng)
    masks = MASKS[torch.arange(len(rewards)) % len(MASKS)]
    return [
        Experience(
            index=part,
            rewards=torch.tensor([rewards[index] for index in part]),
            action_mask=masks[part],
            kl=kls[part] * masks[part],
            values=values[part],
            info={},
        )
        for part in parts
    ]


def by_sample(experiences: list[Experience], name: str) -> dict[int, list[float]]:
    """A field's numbers at each sample's action tokens."""
    return {
        index: getattr(experience, name)[row][experience.action_mask[row].bool()].tolist()
        for experience in experiences
        for row, index in enumerate(experience.index)
    }


class TestOldLogProbs:
    def test_by_hand(self):
        today = torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]])
        stored = torch.tensor([[-0.1, -0.2], [-0.3, -0.4], [-0.5, -0.6]])
        found = old_log_probs(today, stored, torch.tensor([True, False, True]))
        assert torch.equal(found, torch.tensor([[-1.0, -2.0], [-0.3, -0.4], [-5.0, -6.0]]).float())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_has_the_actors_type(self, dtype):
        found = old_log_probs(torch.zeros(1, 2, dtype=dtype), -torch.ones(1, 2), torch.tensor([False]))
        assert found.dtype == dtype and (found == -1).all()

    def test_ratio_of_what_today_generated_is_one(self):
        today = torch.randn(5, 7)
        found = old_log_probs(today, torch.randn(5, 7), torch.ones(5, dtype=torch.bool))
        assert torch.equal((today - found).exp(), torch.ones(5, 7))


class TestGroupAdvantages:
    @pytest.mark.parametrize("size", [2, 4, 8])
    def test_closed_form(self, size):
        # k of G right: (1 - p) / sqrt(p (1 - p) + eps) for the right ones, -p / ... for the wrong ones, p = k / G
        rewards = [1.0 if sample % size < sample // size else 0.0 for sample in range(size * (size + 1))]
        order = np.random.default_rng(0).permutation(len(rewards)).tolist()
        parts = [order[start : start + 3] for start in range(0, len(order), 3)]
        experiences = maker(size=size).compute_advantages_and_returns(split(rewards, parts))
        found = by_sample(experiences, "advantages")
        for sample, reward in enumerate(rewards):
            p = (sample // size) / size
            wanted = (reward - p) / math.sqrt(p * (1 - p) + EPS)
            assert found[sample] == pytest.approx([wanted] * len(found[sample]), rel=1e-6, abs=0)
            if 0 < p < 1 and reward:
                assert found[sample][0] == pytest.approx(math.sqrt((1 - p) / p), rel=1e-4)  # sqrt((G - k) / k)

    @pytest.mark.parametrize(
        "parts", [[[0, 1, 2, 3, 4, 5, 6, 7]], [[5, 0], [3], [7, 1, 6], [2, 4]], [[n] for n in range(7, -1, -1)]]
    )
    @pytest.mark.parametrize("coefficient", [0.0, 0.3])
    def test_matches_a_slow_loop_with_kl_in_the_reward(self, parts, coefficient):
        rewards = [0.0, 1.0, 0.5, 0.25, -2.0, 3.0, 3.0, 0.1]
        given = split(rewards, parts, kl=0.8, seed=3)
        kls = {index: e.kl[row].tolist() for e in given for row, index in enumerate(e.index)}
        masks = {index: e.action_mask[row].tolist() for e in given for row, index in enumerate(e.index)}
        experiences = maker(kl=coefficient).compute_advantages_and_returns(given)
        advantages, returns = by_sample(experiences, "advantages"), by_sample(experiences, "returns")
        sums = {index: float(e.info["return"][row]) for e in experiences for row, index in enumerate(e.index)}
        for sample, reward in enumerate(rewards):
            group = rewards[sample // 4 * 4 :][:4]
            mean = sum(group) / 4
            variance = sum((r - mean) ** 2 for r in group) / 4
            total, wanted = (reward - mean) / math.sqrt(variance + EPS), []
            for position in reversed([n for n, used in enumerate(masks[sample]) if used]):
                total -= coefficient * kls[sample][position]
                wanted.append(total)
            assert advantages[sample] == pytest.approx(wanted[::-1], rel=1e-5, abs=1e-6)
            assert returns[sample] == advantages[sample]
            assert sums[sample] == pytest.approx(total, rel=1e-5, abs=1e-6)
        assert all(experience.kl is None for experience in experiences)

    def test_groups_without_signal_have_no_advantage(self):
        experiences = maker().compute_advantages_and_returns(split([0.1] * 4 + [1.0] * 4, [[0, 5, 2, 7], [4, 1, 6, 3]]))
        assert all(value == 0 for values in by_sample(experiences, "advantages").values() for value in values)

    def test_spread_is_that_of_the_samples_own_group(self):
        experiences = maker().compute_advantages_and_returns(
            split([0.0, 1, 0, 1, 1, 1, 1, 1], [[7, 0], [4, 1, 2], [3, 5, 6]])
        )
        spread = {i: float(e.info["group_reward_std"][row]) for e in experiences for row, i in enumerate(e.index)}
        assert spread == {0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5, 4: 0.0, 5: 0.0, 6: 0.0, 7: 0.0}

    def test_length_penalties_come_first(self):
        # truncated responses get -1: the group is 1, 1, -1, -1 and not 1, 1, 1, 1
        (experience,) = split([1.0] * 4, [[0, 1, 2, 3]])
        experience.truncated = torch.tensor([False, False, True, True])
        (experience,) = maker(reward__stop_properly_penalty_coef=-1.0).compute_advantages_and_returns([experience])
        assert by_sample([experience], "advantages")[0] == pytest.approx([1.0] * 5, rel=1e-5)
        assert by_sample([experience], "advantages")[2] == pytest.approx([-1.0] * 4, rel=1e-5)

    def test_openrlhfs_own_up_to_the_sample_standard_deviation(self):
        rewards, parts = [0.0, 1.0, 0.5, 0.25, 0.0, 0.0, 1.0, 0.0], [[5, 0, 3], [7, 1, 6], [2, 4]]
        ours = by_sample(maker().compute_advantages_and_returns(split(rewards, parts)), "advantages")
        theirs = RemoteExperienceMaker.compute_advantages_and_returns(maker(), split(rewards, parts))
        for sample, values in by_sample(theirs, "advantages").items():
            assert ours[sample] == pytest.approx([value * math.sqrt(4 / 3) for value in values], rel=1e-4)

    @pytest.mark.parametrize("estimator", ["rloo", "reinforce_baseline", "dr_grpo"])
    def test_other_group_estimators_are_openrlhfs(self, estimator):
        rewards, parts = [0.0, 1.0, 0.5, 0.25, 0.0, 0.0, 1.0, 0.0], [[5, 0, 3], [7, 1, 6], [2, 4]]
        ours = maker(estimator).compute_advantages_and_returns(split(rewards, parts))
        theirs = RemoteExperienceMaker.compute_advantages_and_returns(maker(estimator), split(rewards, parts))
        assert by_sample(ours, "advantages") == by_sample(theirs, "advantages")


class TestCritic:
    def test_lambda_1_is_the_reward_minus_the_value(self):
        rewards, parts = [1.0, 0.0, 0.5, 1.0, 0.0, 1.0, 0.0, 0.0], [[6, 1], [0, 3, 7], [2, 4, 5]]
        given = split(rewards, parts, seed=5)
        values = by_sample(given, "values")
        made = maker("gae")
        # some rows replayed: the critic path makes no difference
        made.origins = [SampleOrigin("replayed" if n % 3 else "fresh", n % 3 == 0) for n in range(8)]
        experiences = made.compute_advantages_and_returns(given)
        returns, advantages = by_sample(experiences, "returns"), by_sample(experiences, "advantages")
        raw = {sample: [rewards[sample] - value for value in values[sample]] for sample in values}
        tokens = [value for sample in raw for value in raw[sample]]
        mean = sum(tokens) / len(tokens)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in tokens) / len(tokens))
        for sample in raw:
            assert returns[sample] == pytest.approx([rewards[sample]] * len(raw[sample]), abs=1e-5)
            wanted = [(value - mean) / deviation for value in raw[sample]]
            assert advantages[sample] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        whitened = [value for sample in advantages for value in advantages[sample]]
        assert np.mean(whitened) == pytest.approx(0, abs=1e-5) and np.std(whitened) == pytest.approx(1, rel=1e-4)

    def test_is_openrlhfs(self):
        rewards, parts = [1.0, 0.0, 0.5, 1.0], [[3, 1], [0, 2]]
        changed = {"algo__advantage__lambd": 0.9, "algo__advantage__gamma": 0.97, "kl": 0.1}
        ours = maker("gae", **changed).compute_advantages_and_returns(split(rewards, parts, kl=1.0))
        theirs = RemoteExperienceMaker.compute_advantages_and_returns(
            maker("gae", **changed), split(rewards, parts, kl=1.0)
        )
        for name in ("advantages", "returns"):
            assert by_sample(ours, name) == by_sample(theirs, name)


# --- make_experience --------------------------------------------------------------------------------------------------

PARTS = [[2, 0], [3, 1]]  # micro-batches of a batch of four samples
ON_POLICY = [True, False, False, True]


@pytest.fixture
def made_by_openrlhf(monkeypatch):
    """OpenRLHF's `make_experience` gives these experiences: log-probs of today and of alpha, KL to the reference."""
    rng = torch.Generator().manual_seed(1)
    today, behaviour, reference = -torch.rand((3, 4, 6), generator=rng)
    experiences = [
        Experience(
            index=part,
            action_mask=MASKS[part],
            action_log_probs=today[part].clone(),
            rollout_log_probs=behaviour[part] * MASKS[part],
            base_action_log_probs=reference[part].clone(),
            kl=(today - reference)[part],
            info={"kl": torch.full((2,), 77.0)},
        )
        for part in PARTS
    ]
    asked = []
    monkeypatch.setattr(
        RemoteExperienceMaker, "make_experience", lambda self, samples: asked.append(samples) or experiences
    )
    return SimpleNamespace(today=today, behaviour=behaviour * MASKS, reference=reference, asked=asked)


def make(made_by_openrlhf, **changed) -> tuple[AdaptedExperienceMaker, dict[int, SimpleNamespace]]:
    """Runs `make_experience`; the maker, and each sample's rows."""
    made = maker(**changed)
    made.origins = [SampleOrigin("fresh" if on else "replayed", on) for on in ON_POLICY]
    experiences = made.make_experience("the samples")
    assert made_by_openrlhf.asked == ["the samples"]
    names = ("action_log_probs", "base_action_log_probs", "rollout_log_probs", "kl")
    return made, {
        index: SimpleNamespace(**{name: getattr(e, name)[row] for name in names}, info_kl=float(e.info["kl"][row]))
        for e in experiences
        for row, index in enumerate(e.index)
    }


class TestMakeExperience:
    def test_behaviour_mode_replaces_the_off_policy_rows_alone(self, made_by_openrlhf):
        _, rows = make(made_by_openrlhf)
        for sample, on_policy in enumerate(ON_POLICY):
            wanted = made_by_openrlhf.today if on_policy else made_by_openrlhf.behaviour
            assert torch.equal(rows[sample].action_log_probs, wanted[sample])

    def test_decoupled_mode_replaces_none(self, made_by_openrlhf):
        _, rows = make(made_by_openrlhf, adapt__ratio="decoupled")
        for sample in range(4):
            assert torch.equal(rows[sample].action_log_probs, made_by_openrlhf.today[sample])
            assert torch.equal(rows[sample].rollout_log_probs, made_by_openrlhf.behaviour[sample])

    @pytest.mark.parametrize("ratio", ["behaviour", "decoupled"])
    def test_log_ratios_by_sample(self, made_by_openrlhf, ratio):
        made, _ = make(made_by_openrlhf, adapt__ratio=ratio)
        wanted = [
            sum(
                float(made_by_openrlhf.today[sample][position] - made_by_openrlhf.behaviour[sample][position])
                for position in range(6)
                if MASKS[sample][position]
            )
            for sample in range(4)
        ]
        assert made.log_ratios.tolist() == pytest.approx(wanted, abs=1e-5)

    def test_kl_to_the_reference_is_left_alone(self, made_by_openrlhf):
        _, rows = make(made_by_openrlhf)
        for sample in range(4):
            assert torch.equal(rows[sample].base_action_log_probs, made_by_openrlhf.reference[sample])
            assert torch.equal(rows[sample].kl, (made_by_openrlhf.today - made_by_openrlhf.reference)[sample])
            assert rows[sample].info_kl == 77.0

    @pytest.mark.parametrize("ratio", ["behaviour", "decoupled"])
    def test_kl_to_the_behaviour_policy_in_the_loss(self, made_by_openrlhf, ratio):
        _, rows = make(made_by_openrlhf, adapt__kl_target="behaviour", algo__kl__use_loss=True, adapt__ratio=ratio)
        for sample in range(4):
            assert torch.equal(rows[sample].base_action_log_probs, made_by_openrlhf.behaviour[sample])
            assert torch.equal(rows[sample].kl, (made_by_openrlhf.today - made_by_openrlhf.reference)[sample])

    @pytest.mark.parametrize("ratio", ["behaviour", "decoupled"])
    @pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
    def test_kl_to_the_behaviour_policy_in_the_reward(self, made_by_openrlhf, estimator, ratio):
        formula = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(-d) - 1 + d}[estimator]
        changed = {"adapt__kl_target": "behaviour", "algo__kl__estimator": estimator, "adapt__ratio": ratio}
        _, rows = make(made_by_openrlhf, **changed)
        for sample in range(4):
            # against today's log-probs, also where they are replaced as the old ones
            log_ratio = (made_by_openrlhf.today - made_by_openrlhf.behaviour)[sample].tolist()
            wanted = [formula(d) if on else 0.0 for d, on in zip(log_ratio, MASKS[sample].tolist(), strict=True)]
            assert rows[sample].kl.tolist() == pytest.approx(wanted, abs=1e-6)
            assert rows[sample].info_kl == pytest.approx(sum(wanted) / int(MASKS[sample].sum()), abs=1e-6)
            assert torch.equal(rows[sample].base_action_log_probs, made_by_openrlhf.reference[sample])


class TestSplit:
    def samples(self, count: int) -> list[Experience]:
        return [
            Experience(
                sequences=torch.full((1, 2 + n % 3), n),
                attention_mask=torch.ones((1, 2 + n % 3), dtype=torch.long),
                action_mask=torch.ones((1, 1 + n % 3), dtype=torch.long),
                rewards=torch.tensor([float(n)]),
                prompts=[str(n)],
                info={"n": torch.tensor([n])},
            )
            for n in range(count)
        ]

    def batches(self, count: int, ranks: dict[str, int], micro_rollout: int) -> list[Experience]:
        arithmetic = BatchArithmetic(4, 64, 64, 8, ranks, 1, micro_rollout)
        return maker(arithmetic=arithmetic).split_rollout_samples(self.samples(count))

    def test_keeps_order_index_and_padding(self):
        batches = self.batches(8, {"actor": 2}, 3)
        assert [batch.index for batch in batches] == [[0, 1, 2], [3], [4, 5, 6], [7]]
        assert batches[0].sequences.tolist() == [[0, 0, 9, 9], [1, 1, 1, 9], [2, 2, 2, 2]]  # padded with 9
        assert batches[0].action_mask.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
        assert batches[2].rewards.tolist() == batches[2].info["n"].tolist() == [4, 5, 6]
        assert batches[3].prompts == ["7"]

    @pytest.mark.parametrize(
        "ranks", [{"actor": 1}, {"actor": 2, "critic": 1}, {"actor": 3, "critic": 2, "reference": 4}]
    )
    @pytest.mark.parametrize("micro_rollout", [1, 4, 5, 100])
    def test_openrlhf_hands_each_rank_equally_many(self, monkeypatch, ranks, micro_rollout):
        batches = self.batches(24, ranks, micro_rollout)
        monkeypatch.setattr(launcher.ray, "put", lambda value: value)
        for count in ranks.values():
            loads = []
            worker = SimpleNamespace(
                execute_batch=SimpleNamespace(
                    remote=lambda method, chunk, start, end, loads=loads: loads.append(
                        sum(len(sequences) for sequences in chunk["sequences"])
                    )
                )
            )
            group = object.__new__(launcher.RayActorGroup)
            group._actor_handlers, group.duplicate_actors = [worker] * count, 1
            group.async_run_method_batch("forward", sequences=[batch.sequences for batch in batches])
            assert loads == [24 // count] * count

    def test_what_cannot_be_shared_is_an_error(self):
        with pytest.raises(ValueError, match="7 samples cannot be shared equally by 2 ranks"):
            self.batches(7, {"actor": 2}, 3)


# --- rewards ----------------------------------------------------------------------------------------------------------


class TestCheckedReward:
    @pytest.mark.parametrize(
        "reward", [0, 1.0, -3.5, True, [0.5], torch.tensor(0.5), torch.tensor([[1.0]]), np.float32(2)]
    )
    def test_one_finite_number(self, reward):
        checked_reward({"prompt": "p", "reward": reward})

    @pytest.mark.parametrize("response", [{"prompt": "the prompt"}, {"prompt": "the prompt", "reward": None}])
    def test_none(self, response):
        with pytest.raises(ValueError, match=r"gave no reward for prompt 'the prompt'.*log of the rollout engine"):
            checked_reward(response)

    @pytest.mark.parametrize(("reward", "count"), [([], 0), ([1.0, 2.0], 2), (torch.zeros(3), 3)])
    def test_several(self, reward, count):
        with pytest.raises(ValueError, match=f"returned {count} rewards for one response to prompt 'p'"):
            checked_reward({"prompt": "p", "reward": reward})

    @pytest.mark.parametrize("reward", [float("nan"), float("inf"), [-float("inf")], torch.tensor([float("nan")])])
    def test_not_finite(self, reward):
        with pytest.raises(ValueError, match="for prompt 'p'; rewards must be finite"):
            checked_reward({"prompt": "p", "reward": reward})


# --- joints -----------------------------------------------------------------------------------------------------------


class TestJoints:
    def test_engines_return_log_probs_of_the_sampling_distribution(self):
        calls = []

        def create_vllm_engines(num_engines, seed, max_len=1, logprobs_mode=None, *, name="x"):
            calls.append((num_engines, seed, max_len, logprobs_mode, name))
            return "engines"

        create = joints.with_rollout_log_probs(create_vllm_engines)
        assert create(1, 2) == "engines"
        create(1, 2, 3, "raw_logprobs", name="y")
        create(1, seed=2, logprobs_mode="raw_logprobs")
        create(num_engines=1, seed=2, logprobs_mode=None, max_len=3)
        assert calls == [
            (1, 2, 1, "processed_logprobs", "x"),
            (1, 2, 3, "processed_logprobs", "y"),
            (1, 2, 1, "processed_logprobs", "x"),
            (1, 2, 3, "processed_logprobs", "x"),
        ]

    def test_engines_that_take_no_mode(self):
        with pytest.raises(RuntimeError, match="create_vllm_engines should take logprobs_mode"):
            joints.with_rollout_log_probs(lambda num_engines: None)

    def test_openrlhfs_own_takes_it(self):
        from openrlhf.trainer.ray.vllm_engine import create_vllm_engines

        joints.with_rollout_log_probs(create_vllm_engines)

    @pytest.mark.parametrize("found", ["0.11.1", "0.11.3", "0.11.20", "1.0"])
    def test_another_version(self, monkeypatch, found):
        joints.require_version()
        monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
        with pytest.raises(RuntimeError, match=f"openrlhf {found} is installed; .* extends openrlhf 0.11.2"):
            joints.require_version()
        with pytest.raises(RuntimeError), joints.batch_adaptation(True):
            pass

    def test_no_openrlhf(self, monkeypatch):
        def version(name):
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", version)
        with pytest.raises(RuntimeError, match="openrlhf none is installed"):
            joints.require_version()

    def test_rebound_is_undone_also_after_an_error(self):
        module = ModuleType("module")
        module.a = module.b = "theirs"
        with pytest.raises(KeyError), joints.rebound(module, a="ours"):
            assert (module.a, module.b) == ("ours", "theirs")
            raise KeyError
        assert (module.a, module.b) == ("theirs", "theirs")

    def test_a_name_that_is_gone(self):
        module = ModuleType("module")
        with pytest.raises(RuntimeError, match=r"should have module\.Trainer"), joints.rebound(module, Trainer="ours"):
            pass
        assert not hasattr(module, "Trainer")

    @pytest.mark.parametrize("adapted", [False, True])
    def test_names_of_openrlhf_during_a_run_and_after(self, adapted):
        import openrlhf.cli.train_ppo_ray as cli
        import openrlhf.trainer.ppo_trainer as ppo_trainer
        import openrlhf.trainer.ray.vllm_engine as vllm_engine

        from bapo_openrlhf.integration import engines, trainer, workers

        def names():
            return (
                ppo_trainer.PPOTrainer,
                vllm_engine.RolloutRayActor,
                cli.PolicyModelActor,
                cli.CriticModelActor,
                cli.create_vllm_engines,
            )

        before = names()
        with joints.batch_adaptation(adapted) as module:
            assert module is cli
            during = names()
        assert names() == before
        if adapted:
            assert during[:4] == (
                trainer.AdaptedPPOTrainerActor,
                engines.AdaptedRolloutActor,
                workers.AdaptedPolicyActor,
                workers.AdaptedCriticActor,
            )
            assert during[4] is not before[4]
        else:
            assert during == (trainer.RecordedPPOTrainerActor, *before[1:])

    def test_nothing_here_started_ray(self):
        assert not ray.is_initialized()


GOOD = """
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--a.b", type=int, default=1)
    args = parser.parse_args()
    from openrlhf.utils.config import hierarchize

    args = hierarchize(args)
    assert args.a.b < 9, "b is too large"
    args.a.c = args.a.b + 1
    train(args)
"""


class TestCommandLineOfOpenRLHF:
    @pytest.fixture
    def script(self, monkeypatch, tmp_path):
        """Puts another text in the place of OpenRLHF's script."""
        original = openrlhf_cli._package_file

        def write(text: str) -> None:
            path = tmp_path / "train_ppo_ray.py"
            path.write_text(text, encoding="utf-8")
            openrlhf_cli._main_block.cache_clear()
            monkeypatch.setattr(
                openrlhf_cli,
                "_package_file",
                lambda relative: path if relative == "cli/train_ppo_ray.py" else original(relative),
            )

        yield write
        openrlhf_cli._main_block.cache_clear()

    def test_runs_what_the_file_says(self, script):
        script(GOOD)
        args = openrlhf_cli.validate(openrlhf_cli.build_parser().parse_args(["--a.b", "4"]))
        assert (args.a.b, args.a.c) == (4, 5)
        with pytest.raises(ConfigError, match="OpenRLHF refuses this configuration: b is too large"):
            openrlhf_cli.validate(openrlhf_cli.build_parser().parse_args(["--a.b", "9"]))

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            (GOOD, ""),
            (GOOD, "def main():\n    pass\n"),
            ("\nif __name__", "\nif True:\n    pass\nif 1 and __name__"),
            (GOOD, GOOD + GOOD),
            ("    args = parser.parse_args()", "    args = read_arguments(parser)"),
            ("    args = parser.parse_args()", "    args = parser.parse_args()\n    args = parser.parse_args()"),
            ("argparse.ArgumentParser()", "make_parser()"),
            ("    parser = argparse", "    seed = 1\n    parser = argparse"),
            ("    train(args)\n", "    train(args)\n    print('done')\n"),
            ("    train(args)\n", "    run(args)\n"),
        ],
        ids=range(10),
    )
    def test_another_layout_fails_loudly(self, script, old, new):
        assert old in GOOD
        script(GOOD.replace(old, new))
        for use in (openrlhf_cli.build_parser, lambda: openrlhf_cli.validate(SimpleNamespace())):
            with pytest.raises(RuntimeError, match=r"train_ppo_ray\.py is not laid out as openrlhf 0\.11\.2's is"):
                use()

    def test_another_version_fails_loudly(self, script, monkeypatch):
        script(GOOD)
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.12.0")
        with pytest.raises(RuntimeError, match=r"openrlhf 0\.12\.0 is installed"):
            openrlhf_cli.build_parser()

    def test_a_module_that_is_gone(self):
        with pytest.raises(RuntimeError, match="should have the module no_such_module"):
            openrlhf_cli._installed_file("no_such_module")
