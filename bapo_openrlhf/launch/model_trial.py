"""Ask transformers and vLLM about the models of a run, without their weights.

transformers loads each model as OpenRLHF does, but all its tensors are on torch's meta device: they have shapes and no
numbers. So its own rules say which weights would be missing, too many, or of another shape: those about tied weights,
prefixes, renamed and merged tensors. vLLM reads the configuration as an engine does, without a device.
"""

import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo_openrlhf.errors import ConfigError, one_line, reason_of
from bapo_openrlhf.launch.model_files import Shapes, check_adapters, config_of, few, headers, shapes_of, weight_files


def check_loading(
    model: str, folder: str, role: str, head: str = "score", adapted: Sequence[str] | None = None
) -> list[str]:
    """Refuse a model that transformers does not load whole. Returns a warning of weights that no part of it takes.

    Args:
        model: Flag and value, with which errors begin.
        role: "actor", "critic" or "reward".
        head: Name of the head of a critic or a reward model, unless its config.json has one (value_head_prefix).
        adapted: Matrices that get adapters, by the ends of their names; None without LoRA.
    """
    import torch  # noqa: F401 - the error of transformers would not say that it is not installed

    _refuse_quantized(model, Path(folder))
    try:
        loaded, loading, its_head = _load(folder, role, head)
    except Exception as error:  # transformers raises many kinds
        raise ConfigError(f"{model}; transformers cannot load it: {one_line(error)}") from None
    if role == "actor":
        _refuse_what_cannot_be_saved(model, loaded)
    # OpenRLHF begins with random numbers in the head of a critic.
    new_weights = {f"{its_head}.weight"} if role == "critic" else set()
    if missing_weights := sorted({*loading["missing_keys"]} - new_weights):
        raise ConfigError(f"{model}; {_lacks(role, missing_weights, f'{its_head}.weight')}")
    if mismatches := sorted(loading["mismatched_keys"]):
        name, has, needs = mismatches[0]
        raise ConfigError(
            f"{model}; its weights {name} are {list(has)}, and by its config.json they must be {list(needs)}"
        )
    if adapted is not None:
        shapes = {name: value.shape for name, value in loaded.named_parameters()}
        tied = bool(getattr(loaded.config.get_text_config(), "tie_word_embeddings", False))
        check_adapters(f"{role}.model_name_or_path {folder}", adapted, shapes, tied=tied)
    surplus = sorted(loading["unexpected_keys"])
    if its_head:  # a causal language model has another head
        surplus = [name for name in surplus if name.startswith(f"{loaded.base_model_prefix}.")]
    return [f"{model}: no part of the model takes its weights {few(surplus)}"] if surplus else []


def _refuse_what_cannot_be_saved(model: str, loaded: Any) -> None:
    """Refuse a generation_config.json that transformers reads, but does not write."""
    from bapo_openrlhf.training.worker.mended_models import make_savable  # it imports torch

    try:
        make_savable(loaded)
    except ValueError as error:
        raise ConfigError(f"{model}; transformers refuses its generation_config.json: {one_line(error)}") from None


def _refuse_quantized(model: str, folder: Path) -> None:
    """Refuse weights in fewer than 16 bits. transformers would load some of them, without their scales."""
    quantized = (config_of(model, folder).get("quantization_config") or {}).get("quant_method")
    for path in weight_files(model, folder):
        kinds = {kind for kind, _ in headers(model, path).values()} if path.suffix == ".safetensors" else set()
        quantized = quantized or next((kind for kind in sorted(kinds) if re.match("F8_|F6_|F4", kind)), None)
    if quantized:
        raise ConfigError(
            f"{model}; its weights are quantized ({quantized}), and must be in bf16 or float32 to be trained"
        )


def _lacks(role: str, missing: list[str], head: str) -> str:
    if role == "reward" and missing == [head]:
        return (f"it has no weights {head}, the head that gives a score, so it is no reward model, or "
                "--ds.value_head_prefix must name its head")  # fmt: skip
    return f"it has no weights {few(missing)}, and they would begin with random numbers"


def _vllm_settings(folder: str, longest: int) -> dict[str, Any]:
    """What an engine gives vLLM, as far as its model depends on it."""
    return {
        "model": folder,
        "tokenizer": folder,
        "max_model_len": longest,
        "dtype": "bfloat16",
        "trust_remote_code": True,
    }


def check_generation(model: str, folder: str, longest: int) -> list[str]:
    """Refuse a model that vLLM does not take as an engine's, for sequences of `longest` tokens (`data.max_len`)."""
    from vllm.config import ModelConfig
    from vllm.platforms import current_platform

    if current_platform.is_unspecified():  # vLLM is for GPUs, and this machine has none
        return []
    try:
        config = ModelConfig(**_vllm_settings(folder, longest))
    except Exception as error:  # of pydantic, or of what reads the configuration
        raise ConfigError(f"{model}, and data.max_len is {longest}; vLLM refuses it: {reason_of(error)}") from None
    if config.runner_type != "generate":
        raise ConfigError(
            f"{model}; vLLM takes it for a {', '.join(config.architectures)}, which generates no text: "
            "`architectures` in its config.json must name a causal language model"
        )
    if config.quantization:
        raise ConfigError(
            f"{model}; vLLM takes its weights for quantized ({config.quantization}), and the engines must take "
            "those of a model that is trained"
        )
    return []


def check_sync(model: str, folder: str, longest: int) -> list[str]:
    """Ask vLLM, by their names, whether the engines take all weights of the actor in a sync.

    A folder's files and transformers may name a weight differently, or one holds in one tensor what the other has in
    several. vLLM is written for the names of the files. A sync sends transformers'. vLLM refuses some of them in the
    first sync, and passes over others, so that the engines would keep old weights for ever.

    Returns a warning if vLLM has to be asked, and its model cannot be made here.
    """
    import torch  # noqa: F401 - as in `check_loading`

    file_shapes = shapes_of(model, Path(folder))
    actor, _, _ = _load(folder, "actor")
    synced_shapes = {name: tuple(value.shape) for name, value in actor.named_parameters()}
    if synced_shapes.keys() <= file_shapes.keys():
        return []
    try:
        with _engines_model(_vllm_settings(folder, longest)) as engines_model:
            _compare(model, engines_model, synced_shapes, _written(engines_model, file_shapes))
    except ConfigError:
        raise
    except Exception as error:  # of a machine without the engines' devices, above all
        return [f"{model}: whether vLLM takes its weights in a sync is not known here: {reason_of(error)[:300]}"]
    return []


def _compare(model: str, engines_model: Any, shapes: Shapes, of_files: Counter[str]) -> None:
    """Send the actor's names. `of_files` is what the weights of the files write."""
    reason = "transformers names its weights differently from its files, and vLLM knows only the latter"
    try:
        kept_names = sorted(of_files - _written(engines_model, shapes))
    except Exception as error:  # of vLLM's loader of this model
        raise ConfigError(f"{model}; {reason}: it refuses a sync: {reason_of(error)[:300]}") from None
    if kept_names:
        raise ConfigError(f"{model}; {reason}: in a sync it would pass over {few(kept_names)}")


def warn_of_dropout(model: str, folder: str) -> list[str]:
    """A warning if a model would train with dropout, also if that is the default of the model's kind."""
    from transformers import CONFIG_MAPPING

    from bapo_openrlhf.training.worker.mended_models import noise_of

    config = config_of(model, Path(folder))
    config |= config.get("text_config") or {}
    kind = config.get("model_type")
    defaults = CONFIG_MAPPING[kind]().to_dict() if kind in CONFIG_MAPPING else {}
    noise = ", ".join(f"{name} {value:g}" for name, value in noise_of(defaults | config).items())
    return [
        f"{model}, whose config.json has {noise}: without batch adaptation a model trains with this, so that "
        "the first ratio is not 1, and tokens are clipped before anything was learned; with 0 in config.json it "
        "does not"
    ] * bool(noise)


def check_schedule(
    scheduler: str, model: str, kind: str, rate: float, warm_up: float, lowest: float, steps: int
) -> list[str]:
    """Refuse a learning-rate schedule that has no rate for one of the optimizer steps.

    Args:
        scheduler: Flag and value, with which the error begins.
        model: "actor" or "critic".
        kind: transformers' name of the schedule.
        rate: The highest learning rate.
        warm_up: Share of the steps.
        lowest: Share of the highest rate in which some schedules end.
        steps: Optimizer steps of the run.
    """
    import torch
    from transformers import get_scheduler

    ends = kind in ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
    optimizer, step = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate), 0
    try:
        schedule = get_scheduler(
            kind, optimizer, num_warmup_steps=math.ceil(steps * warm_up), num_training_steps=steps,
            scheduler_specific_kwargs={"min_lr_rate": lowest} if ends else {},
        )  # fmt: skip
        for step in range(steps + 1):
            if not math.isfinite(schedule.lr_lambdas[0](step)):
                raise ValueError("the rate is not finite")
    except Exception as error:  # of transformers
        after = f"after step {step} of {steps}" if step else "at its start"
        raise ConfigError(
            f"{scheduler}; with a learning rate of {rate:g} and {model}.lr_warmup_ratio {warm_up:g} it fails {after}: "
            f"{one_line(error)}; take another schedule, rate or warm-up, or more steps"
        ) from None
    return []


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
