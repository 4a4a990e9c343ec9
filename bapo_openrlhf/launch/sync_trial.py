"""Ask vLLM whether it takes the weights that a sync sends, by their names.

A folder's files and transformers may name a weight differently, or one holds in one tensor what the other has in
several. vLLM is written for the names of the files. A sync sends transformers'. vLLM refuses some of them in the first
sync, and passes over others, so that the engines would keep old weights for ever.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bapo_openrlhf.errors import ConfigError, reason_of
from bapo_openrlhf.launch.model_files import few, shapes_of
from bapo_openrlhf.launch.model_trial import OfEngine, load

Shapes = Mapping[str, Sequence[int]]


class Synced(OfEngine):
    """Whether the engines take all weights of the actor in a sync."""

    def answer(self) -> list[str]:
        """A warning if vLLM has to be asked, and its model cannot be made here."""
        stored = shapes_of(self.flag, Path(self.folder))
        sent = {name: tuple(value.shape) for name, value in load(self.folder).named_parameters()}
        if sent.keys() <= stored.keys():
            return []
        try:
            with _engines_model(self.settings) as model:
                self._compare(model, sent, _written(model, stored))
        except ConfigError:
            raise
        except Exception as error:  # of a machine without the engines' devices, above all
            reason = reason_of(error)[:300]
            return [f"{self.about}: whether vLLM takes its weights in a sync is not known here: {reason}"]
        return []

    def _compare(self, model: Any, sent: Shapes, first: Counter[str]) -> None:
        """Send the actor's names. `first` is what the weights of the files write."""
        says = "transformers names its weights differently from its files, and vLLM knows only the latter"
        try:
            kept = sorted(first - _written(model, sent))
        except Exception as error:  # of vLLM's loader of this model
            raise ConfigError(f"{self.about}; {says}: it refuses a sync: {reason_of(error)[:300]}") from None
        if kept:
            raise ConfigError(f"{self.about}; {says}: in a sync it would pass over {few(kept)}")


def _written(model: Any, shapes: Shapes) -> Counter[str]:
    """How many numbers of each parameter are written. vLLM itself leaves out the parts of mixtures of experts."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    names = {value.untyped_storage()._cdata: name for name, value in model.named_parameters()}
    written: Counter[str] = Counter()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation is torch.ops.aten.copy_.default and (place := args[0].untyped_storage()._cdata) in names:
                written[names[place]] += args[0].numel()
            return operation(*args, **(kwargs or {}))

    tensors = [(name, torch.empty(shape, dtype=torch.bfloat16, device="meta")) for name, shape in shapes.items()]
    with Watch():
        model.load_weights(iter(tensors))
    return written


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
