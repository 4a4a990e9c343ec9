"""Ask transformers and vLLM about the models of a run, without their weights.

transformers loads each model as OpenRLHF does, but all its tensors are on torch's meta device: they have shapes and no
numbers. So its own rules say which weights would be missing, too many, or of another shape: those about tied weights,
prefixes, renamed and merged tensors. vLLM reads the configuration as an engine does, without a device.
"""

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapo_openrlhf.errors import ConfigError, one_line, reason_of
from bapo_openrlhf.launch.model_files import Shapes, check_adapters, config_of, few, headers, shapes_of, weight_files


@dataclass(frozen=True)
class OfModel:
    """A question about the model in a folder."""

    flag: str  # the flag that names the folder
    folder: str  # the model's

    @property
    def about(self) -> str:
        return f"{self.flag} is {self.folder}"


@dataclass(frozen=True)
class OfEngine(OfModel):
    """A question about the model of the engines."""

    longest: int  # tokens of the longest sequence (`data.max_len`)

    @property
    def settings(self) -> dict[str, Any]:
        """What an engine gives vLLM, as far as its model depends on it."""
        return {
            "model": self.folder,
            "tokenizer": self.folder,
            "max_model_len": self.longest,
            "dtype": "bfloat16",
            "trust_remote_code": True,
        }


@dataclass(frozen=True)
class Loaded(OfModel):
    """Whether transformers loads a model whole."""

    role: str  # "actor", "critic" or "reward"
    # Name of the head of a critic or a reward model, unless its config.json has one (value_head_prefix).
    head: str = "score"
    # Matrices that get adapters, by the ends of their names; None without LoRA.
    adapted: tuple[str, ...] | str | None = None

    def answer(self) -> list[str]:
        """A warning of weights that no part of the model takes."""
        import torch  # noqa: F401 - an error of transformers would not say that it is not installed

        self._refuse_quantized()
        try:
            model, loading, head = _load(self.folder, self.role, self.head)
        except Exception as error:  # transformers raises many kinds
            raise ConfigError(f"{self.about}; transformers cannot load it: {one_line(error)}") from None
        if self.role == "actor":
            self._refuse_what_cannot_be_saved(model)
        # OpenRLHF begins with random numbers in the head of a critic.
        new_weights = {f"{head}.weight"} if self.role == "critic" else set()
        if missing_weights := sorted({*loading["missing_keys"]} - new_weights):
            raise ConfigError(f"{self.about}; {self._lacks(missing_weights, f'{head}.weight')}")
        if mismatches := sorted(loading["mismatched_keys"]):
            name, has, needs = mismatches[0]
            raise ConfigError(
                f"{self.about}; its weights {name} are {list(has)}, and by its config.json they must be {list(needs)}"
            )
        if self.adapted is not None:
            shapes = {name: value.shape for name, value in model.named_parameters()}
            tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
            check_adapters(f"{self.flag} {self.folder}", self.adapted, shapes, tied=tied)
        surplus = sorted(loading["unexpected_keys"])
        if head:  # a causal language model has another head
            surplus = [name for name in surplus if name.startswith(f"{model.base_model_prefix}.")]
        return [f"{self.about}: no part of the model takes its weights {few(surplus)}"] if surplus else []

    def _refuse_what_cannot_be_saved(self, model: Any) -> None:
        """Refuse a generation_config.json that transformers reads, but does not write."""
        from bapo_openrlhf.training.worker.mended_models import make_savable  # it imports torch

        try:
            make_savable(model)
        except ValueError as error:
            why = one_line(error)
            raise ConfigError(f"{self.about}; transformers refuses its generation_config.json: {why}") from None

    def _refuse_quantized(self) -> None:
        """Refuse weights in fewer than 16 bits. transformers would load some of them, without their scales."""
        folder = Path(self.folder)
        quantized = (config_of(self.about, folder).get("quantization_config") or {}).get("quant_method")
        for path in weight_files(self.flag, folder):
            kinds = {kind for kind, _ in headers(self.flag, path).values()} if path.suffix == ".safetensors" else set()
            quantized = quantized or next((kind for kind in sorted(kinds) if kind.startswith(("F8", "F6", "F4"))), None)
        if quantized:
            raise ConfigError(
                f"{self.about}; its weights are quantized ({quantized}), and must be in bf16 or float32 to be trained"
            )

    def _lacks(self, missing: list[str], head: str) -> str:
        if self.role == "reward" and missing == [head]:
            return (f"it has no weights {head}, the head that gives a score, so it is no reward model, or "
                    "--ds.value_head_prefix must name its head")  # fmt: skip
        return f"it has no weights {few(missing)}, and they would begin with random numbers"


class Generates(OfEngine):
    """Whether vLLM takes a model as an engine's."""

    def answer(self) -> list[str]:
        from vllm.config import ModelConfig
        from vllm.platforms import current_platform

        if current_platform.is_unspecified():  # vLLM is for GPUs, and this machine has none
            return []
        try:
            model = ModelConfig(**self.settings)
        except Exception as error:  # of pydantic, or of what reads the configuration
            raise ConfigError(
                f"{self.about}, and data.max_len is {self.longest}; vLLM refuses it: {reason_of(error)}"
            ) from None
        if model.runner_type != "generate":
            raise ConfigError(
                f"{self.about}; vLLM takes it for a {', '.join(model.architectures)}, which generates no text: "
                "`architectures` in its config.json must name a causal language model"
            )
        if model.quantization:
            raise ConfigError(
                f"{self.about}; vLLM takes its weights for quantized ({model.quantization}), and the engines must take "
                "those of a model that is trained"
            )
        return []


class Synced(OfEngine):
    """Whether the engines take all weights of the actor in a sync: vLLM is asked, by their names.

    A folder's files and transformers may name a weight differently, or one holds in one tensor what the other has in
    several. vLLM is written for the names of the files. A sync sends transformers'. vLLM refuses some of them in the
    first sync, and passes over others, so that the engines would keep old weights for ever.
    """

    def answer(self) -> list[str]:
        """A warning if vLLM has to be asked, and its model cannot be made here."""
        import torch  # noqa: F401 - as above

        file_shapes = shapes_of(self.flag, Path(self.folder))
        actor, _, _ = _load(self.folder, "actor")
        synced_shapes = {name: tuple(value.shape) for name, value in actor.named_parameters()}
        if synced_shapes.keys() <= file_shapes.keys():
            return []
        try:
            with _engines_model(self.settings) as model:
                self._compare(model, synced_shapes, _written(model, file_shapes))
        except ConfigError:
            raise
        except Exception as error:  # of a machine without the engines' devices, above all
            reason = reason_of(error)[:300]
            return [f"{self.about}: whether vLLM takes its weights in a sync is not known here: {reason}"]
        return []

    def _compare(self, model: Any, shapes: Shapes, of_files: Counter[str]) -> None:
        """Send the actor's names. `of_files` is what the weights of the files write."""
        reason = "transformers names its weights differently from its files, and vLLM knows only the latter"
        try:
            kept_names = sorted(of_files - _written(model, shapes))
        except Exception as error:  # of vLLM's loader of this model
            raise ConfigError(f"{self.about}; {reason}: it refuses a sync: {reason_of(error)[:300]}") from None
        if kept_names:
            raise ConfigError(f"{self.about}; {reason}: in a sync it would pass over {few(kept_names)}")


class Noisy(OfModel):
    """Whether a model would train with dropout, also if that is the default of the model's kind."""

    def answer(self) -> list[str]:
        from transformers import CONFIG_MAPPING

        from bapo_openrlhf.training.worker.mended_models import noise_of

        config = config_of(self.about, Path(self.folder))
        config |= config.get("text_config") or {}
        kind = config.get("model_type")
        defaults = CONFIG_MAPPING[kind]().to_dict() if kind in CONFIG_MAPPING else {}
        noise = ", ".join(f"{name} {value:g}" for name, value in noise_of(defaults | config).items())
        return [
            f"{self.about}, whose config.json has {noise}: without batch adaptation a model trains with this, so that "
            "the first ratio is not 1, and tokens are clipped before anything was learned; with 0 in config.json it "
            "does not"
        ] * bool(noise)


@dataclass(frozen=True)
class Scheduled:
    """Whether a learning-rate schedule has a rate for each optimizer step."""

    model: str  # "actor" or "critic"
    kind: str  # transformers' name of the schedule
    rate: float  # the highest learning rate
    warm_up: float  # share of the steps
    lowest: float  # share of the highest rate in which some schedules end
    steps: int  # optimizer steps of the run

    @property
    def about(self) -> str:
        return f"{self.model}.lr_scheduler is {self.kind}"

    def answer(self) -> list[str]:
        import torch  # noqa: F401 - as above

        step = 0
        try:
            rate_in = self._schedule()
            for step in range(self.steps + 1):
                if not math.isfinite(rate_in(step)):
                    raise ValueError("the rate is not finite")
        except Exception as error:  # of transformers
            after = f"after step {step} of {self.steps}" if step else "at its start"
            raise ConfigError(
                f"{self.about}; with a learning rate of {self.rate:g} and {self.model}.lr_warmup_ratio "
                f"{self.warm_up:g} it fails {after}: {one_line(error)}; take another schedule, rate or warm-up, or "
                "more steps"
            ) from None
        return []

    def _schedule(self) -> Callable[[int], float]:
        import torch
        from transformers import get_scheduler

        ends = self.kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.rate)
        schedule = get_scheduler(
            self.kind, optimizer, num_warmup_steps=math.ceil(self.steps * self.warm_up), num_training_steps=self.steps,
            scheduler_specific_kwargs={"min_lr_rate": self.lowest} if ends else {},
        )  # fmt: skip
        return schedule.lr_lambdas[0]


def _load(folder: str, role: str, head: str | None = None) -> tuple[Any, dict[str, Any], str | None]:
    """A model without numbers, what transformers says of its weights, and the name of its head; None for an actor."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    transformers.utils.logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    kind: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    if role != "actor":
        head = getattr(config, "value_head_prefix", head)
        kind = _scoring(config, str(head))
    model, loading = kind.from_pretrained(
        folder, config=config, device_map={"": "meta"}, attn_implementation="eager", trust_remote_code=True,
        ignore_mismatched_sizes=True, output_loading_info=True,
    )  # fmt: skip
    return model, loading, head


def _scoring(config: Any, head: str) -> Any:
    """The class of a critic or a reward model: what OpenRLHF makes of the class of the language model."""
    import torch
    from transformers import AutoModel

    base = AutoModel._model_mapping[type(config)]

    class Scoring(base.__base__):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            setattr(self, self.base_model_prefix, base(config))
            setattr(self, head, torch.nn.Linear(config.hidden_size, 1, bias=False))
            self.post_init()

    return Scoring


def _written(model: Any, shapes: Shapes) -> Counter[str]:
    """How many numbers of each parameter are written. vLLM itself leaves out the parts of mixtures of experts."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    names = {value.untyped_storage()._cdata: name for name, value in model.named_parameters()}
    numbers_by_name: Counter[str] = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation is torch.ops.aten.copy_.default and (place := args[0].untyped_storage()._cdata) in names:
                numbers_by_name[names[place]] += args[0].numel()
            return operation(*args, **(kwargs or {}))

    tensors = [(name, torch.empty(shape, dtype=torch.bfloat16, device="meta")) for name, shape in shapes.items()]
    with Watch():
        model.load_weights(iter(tensors))
    return numbers_by_name


@contextmanager
def _engines_model(settings: Mapping[str, Any]) -> Iterator[Any]:
    """vLLM's model with these settings, without numbers, in a group of processes that has only this one."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(**settings, enforce_eager=True).create_engine_config()
    with tempfile.TemporaryDirectory() as meeting, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{meeting}/point", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with torch.device("meta"):
            model = initialize_model(config)
        yield model
