"""How a worker saves: OpenRLHF's strategy, where an old checkpoint or another user's rights end no run.

Each process that reads data has this strategy, and so knows how the rows were kept.
"""

from pathlib import Path
from typing import Any

from openrlhf.utils.deepspeed.deepspeed import DeepspeedStrategy

import bapo_openrlhf.record.kept_rows  # noqa: F401  # `datasets` learns its type of columns
from bapo_openrlhf.host import extends
from bapo_openrlhf.record.durable import discard, open_to_others


class Strategy(DeepspeedStrategy):
    """OpenRLHF's strategy."""

    @extends(DeepspeedStrategy)
    def save_ckpt(
        self, model: Any, save_dir: str, tag: str, max_num: int = 3, max_mem: float = 1000, *args: Any, **kwargs: Any
    ) -> None:
        """Save a checkpoint, after the older ones that are too many were deleted, or else were moved out of the way.

        OpenRLHF then has none to delete. If it had, one that cannot be deleted would end the run. `max_mem` is in GiB.
        """
        if self.is_rank_0():
            make_room(Path(save_dir), tag, max_num, max_mem)
        super().save_ckpt(model, save_dir, tag, max_num, max_mem, *args, **kwargs)

    @extends(DeepspeedStrategy)
    def save_model(self, model: Any, tokenizer: Any, output_dir: str, **kwargs: Any) -> None:
        """Save a model that others may read, as far as the umask allows it."""
        super().save_model(model, tokenizer, output_dir, **kwargs)
        if self.is_rank_0():
            open_to_others(Path(output_dir))


def make_room(folder: Path, tag: str, max_num: int, max_mem: float) -> None:
    """Delete the best checkpoint before a new best one, and the oldest others while they are too many or too large."""
    checkpoints = sorted((path for path in folder.glob("*") if path.is_dir()), key=lambda path: path.stat().st_mtime)
    best = [path for path in checkpoints if path.name.startswith("best")]
    others = [path for path in checkpoints if path not in best]
    if is_best := tag.startswith("best"):
        for path in best:
            if path.name != tag:
                discard(path, folder.parent)
    while others and ((not is_best and len(others) >= max_num) or size_of(folder) > max_mem * 1024**3):
        discard(others.pop(0), folder.parent)


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder's folders."""
    return sum(path.stat().st_size for path in folder.glob("*/**/*") if path.is_file())


def strategy_of(args: Any) -> Strategy:
    """OpenRLHF's `get_strategy` with this class."""
    train = args.train
    return Strategy(
        seed=train.seed,
        full_determinism=train.full_determinism_enable,
        max_norm=getattr(args, "max_norm", 1.0),
        micro_train_batch_size=train.micro_batch_size,
        train_batch_size=train.batch_size,
        zero_stage=args.ds.zero_stage,
        args=args,
    )
