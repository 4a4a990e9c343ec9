"""What a rule about flags is, and what it can ask: the values of all flags, and what follows from them."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.config import flags_of
from bapo_openrlhf.flags.ranges import MODELS
from bapo_openrlhf.methods import Method

FILTERING = "algo.dynamic_filtering_enable"
PACKS = "ds.packing_samples", "train.dynamic_batch_enable"  # the second switches the first on


class Flags(dict[str, Any]):
    """The values of all flags by dotted name, and what follows from them."""

    # Names of the flags that were given for the algorithm and the method that are in effect.
    chosen: Collection[str] = ()
    method: Method | None = None  # the method; None if batches are not adapted, or while only the flags are looked at
    prompts: int | None = None  # rows of the training data that the run may take; None if they are not known
    steps: int | None = None  # trainer steps of the whole run; None if they are not known

    @classmethod
    def of(cls, args: SimpleNamespace) -> "Flags":
        """The flags of nested arguments."""
        flags = cls(flags_of(args))
        flags.chosen = getattr(args, "chosen", ())
        return flags

    @property
    def adapted(self) -> bool:
        return bool(self["adapt.method"] != "none")

    @property
    def critic(self) -> bool:
        return bool(self["algo.advantage.estimator"] == "gae")

    @property
    def packing(self) -> str | None:
        """The flag that makes OpenRLHF pack samples."""
        return next((flag for flag in PACKS if self.get(flag)), None)

    @property
    def loaded(self) -> list[str]:
        """The models that OpenRLHF loads beside the engines."""
        to_behaviour = self.adapted and self["adapt.kl_target"] == "behaviour"
        loaded = {
            "actor": True,
            "critic": self.critic,
            "ref": self["algo.kl.init_coef"] > 0 and not to_behaviour,
            "reward": not (self["reward.remote_url"] or self["train.agent_func_path"]),
        }
        return [model for model in MODELS if loaded[model]]

    def gpus(self, model: str) -> int:
        """GPUs of a model."""
        return int(self[f"{model}.num_nodes"] * self[f"{model}.num_gpus_per_node"])

    def ranks(self, model: str) -> int:
        """Data-parallel ranks of a model."""
        return max(self.gpus(model) // self.copies, 1)

    @property
    def copies(self) -> int:
        """GPUs that share a sample."""
        return int(self["ds.tensor_parallel_size"])

    def shape(self, model: str) -> str:
        """The GPUs of a model in words."""
        nodes, gpus = self[f"{model}.num_nodes"], self[f"{model}.num_gpus_per_node"]
        return f"{model}.num_gpus_per_node is {gpus}" + (f" (on {nodes} nodes)" if nodes > 1 else "")

    @property
    def sampled(self) -> int:
        """Samples of a rollout batch."""
        return int(self["rollout.batch_size"] * self["rollout.n_samples_per_prompt"])

    @property
    def capacity(self) -> int:
        """B: groups that a training batch holds at most."""
        return int((self["adapt.batch_size"] if self.adapted else None) or self["rollout.batch_size"])

    @property
    def most_samples(self) -> int:
        """Samples of a training batch or of a rollout batch, whichever is larger."""
        return max(self.batch_samples, self.sampled)

    @property
    def batch_samples(self) -> int:
        """Samples that a training batch holds at most."""
        return self.capacity * int(self["rollout.n_samples_per_prompt"])

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response."""
        return int(self["rollout.max_new_tokens"] or self["data.max_len"])

    @property
    def ahead(self) -> int:
        """Steps that generation is ahead of training; 0 in synchronous mode."""
        most = self["adapt.max_staleness"]
        queue = int(self["train.async_queue_size"] if self["train.async_enable"] else 0)
        return queue if most is None else min(queue, most)

    def words(self, name: str) -> str:
        """A flag and its value, as messages name them."""
        value = self[name]
        return f"{name} is {' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"


@dataclass(frozen=True)
class Rule:
    """What flags may not be together, or are seldom meant to be together."""

    flag: str  # the flag that the message is about
    broken: Callable[[Flags], Any]  # whether the rule is broken
    # The message. In it, {it} is the flag and its value, and {f} are all flags: {f[train.seed]}, {f.steps}.
    says: str | Callable[[Flags], str]

    def message(self, f: Flags) -> str | None:
        """The message; None if the rule is kept."""
        if not self.broken(f):
            return None
        return self.says(f) if callable(self.says) else self.says.format(it=f.words(self.flag), f=f)


def messages(rules: Iterable[Rule], f: Flags) -> Iterator[str]:
    """The message of each rule that is broken."""
    return (message for rule in rules if (message := rule.message(f)) is not None)


def check_rules(rules: Iterable[Rule], f: Flags) -> None:
    """Raise ConfigError with the message of the first rule that is broken."""
    message = next(messages(rules, f), None)
    if message is not None:
        raise ConfigError(message)


def beside(
    cause: str,
    flag: str,
    must: str,
    broken: Callable[[Flags], Any] | None = None,
    when: Callable[[Flags], Any] | None = None,
) -> Rule:
    """What another flag must be if `cause` is set; `must` are the words after "it must".

    Without `broken`, the other flag is wrong if it has a value. Without `when`, the cause is set if its value counts.
    """
    counts = when or (lambda f: f[cause] and (f.adapted or not cause.startswith("adapt.")))
    wrong = broken or (lambda f: f[flag])
    return Rule(flag, lambda f: counts(f) and wrong(f), "{it}; with " + cause + " {f[" + cause + "]} it must " + must)
