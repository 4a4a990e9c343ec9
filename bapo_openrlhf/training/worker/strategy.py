"""How a worker saves: OpenRLHF's strategy, where an old checkpoint or another user's rights end no run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf import utils
from openrlhf.utils import deepspeed

from bapo_openrlhf.host import extends, rebound
from bapo_openrlhf.record.discard import discard
from bapo_openrlhf.record.durable import open_to_others


class Strategy(deepspeed.DeepspeedStrategy):
    """OpenRLHF's strategy."""

    @extends(deepspeed.DeepspeedStrategy)
    def save_ckpt(self, model: Any, save_dir: str, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint. Older ones that are too many and cannot be deleted are moved out of the way."""
        deletes = SimpleNamespace(rmtree=lambda folder: discard(Path(folder), Path(save_dir).parent))
        with rebound(deepspeed.deepspeed, shutil=deletes):
            super().save_ckpt(model, save_dir, *args, **kwargs)

    @extends(deepspeed.DeepspeedStrategy)
    def save_model(self, model: Any, tokenizer: Any, output_dir: str, **kwargs: Any) -> None:
        """Save a model that others may read, as far as the umask allows it."""
        super().save_model(model, tokenizer, output_dir, **kwargs)
        if self.is_rank_0():
            open_to_others(Path(output_dir))


def strategy_of(args: Any) -> Strategy:
    """What OpenRLHF's `get_strategy` returns, as this class."""
    with rebound(deepspeed, DeepspeedStrategy=Strategy):
        return utils.get_strategy(args)
