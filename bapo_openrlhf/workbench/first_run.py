"""What `init` writes for a user's own model, problems and machine: numbers with which a first run can learn."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from bapo_openrlhf.data.reading import TEXTS, kind_of, rows_of
from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.flags.sizes import ENOUGH_STEPS
from bapo_openrlhf.launch.model_files import positions_of, read_json
from bapo_openrlhf.user_file import at_home, is_file, start_of
from bapo_openrlhf.workbench.planning.constants import constants_of
from bapo_openrlhf.workbench.planning.memory import gpu_memory
from bapo_openrlhf.workbench.planning.shapes import shape_of_actor
from bapo_openrlhf.workbench.planning.workload import Workload

INPUTS = ("input", "prompt", "question", "problem", "messages")  # names of the column with problems, by preference
LABELS = ("label", "answer", "solution", "ground_truth", "target")
LEAST_ROWS = 20  # with different prompts
HELD_OUT, MOST_HELD_OUT = 10, 100  # one prompt of so many is for evaluations, and at most so many are
GROUP = 8  # responses to a prompt
MOST_PROMPTS, LEAST_PROMPTS = 64, 8  # of a step
STEPS_OF_A_PASS = 16  # fewer prompts are in a step if a pass through the data would have fewer steps
MOST_TOKENS, RESPONSE = 5120, 4096
MOST_TOKENS_ON_A_CPU, RESPONSE_ON_A_CPU = 384, 128
# A rate of 1e-6 is usual from 3 billion parameters on, and SmolLM2-135M has learned with 1e-5. The exponent is that of
# the line through both, on logarithmic scales.
USUAL_RATE, USUAL_SIZE, EXPONENT, HIGHEST_RATE = 1e-6, 3e9, 0.75, 5e-4
GPUS = {"4090": "24 GB", "H100": "80 GB"}  # kinds that `plan` knows, and their memory


class Problems(NamedTuple):
    """The user's problems: the names of their columns, and the rows of both files, with only these columns."""

    input_key: str
    label_key: str
    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]


def problems_in(path: Path) -> Problems:
    """Divide the rows of a file, or raise ConfigError. No prompt of the held-out ones is among the others."""
    rows = _rows(path)
    columns = [*rows[0]] if rows else []
    keys = []
    for names in (INPUTS, LABELS):
        there = [name for name in names if name in columns]
        if not there:
            raise ConfigError(
                f"data is {path}; its columns are {', '.join(columns) or 'none'}, and one must be named "
                f"{', '.join(names[:-1])} or {names[-1]}"
            )
        differ = (name for name in there if any(row.get(name) != rows[0][name] for row in rows))
        keys.append(next(differ, there[0]))
    rows = [{key: row.get(key) for key in keys} for row in rows]
    by_prompt = {repr(row[keys[0]]): row for row in rows}  # a prompt may be a list of messages
    if len(by_prompt) < LEAST_ROWS:
        raise ConfigError(
            f"data is {path}; it has {len(rows)} rows with {len(by_prompt)} different prompts (column {keys[0]}), and "
            f"must have at least {LEAST_ROWS}"
        )
    held_out = [*by_prompt.values()][HELD_OUT - 1 :: HELD_OUT][:MOST_HELD_OUT]
    prompts = [row[keys[0]] for row in held_out]
    return Problems(*keys, [row for row in rows if row[keys[0]] not in prompts], held_out)


def _rows(path: Path) -> list[Any]:
    if not is_file("data", path):
        raise ConfigError(f"data is {path}; there is no such file{start_of(path)}")
    if kind_of(path) in TEXTS:
        return [*rows_of(f"data {path}", path)]
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise ConfigError(f"data is {path}; it cannot be read: {error}") from None
    raise ConfigError(f"data is {path}; it must be a file that ends in {', '.join((*TEXTS, '.parquet'))}")


class Model(NamedTuple):
    """What is known of a model without its weights; None of the rest. `positions` are those of the longest sequence."""

    parameters: int | None
    positions: float
    chat: bool


SMOLLM2 = Model(134_515_008, 8192, chat=True)


def look_at_model(name: str) -> Model:
    """A model by its folder, or by a name that `plan` knows. What is not known is taken to be a chat model's."""
    folder = at_home(name)
    try:
        shape = shape_of_actor(name)
    except ConfigError:
        shape = None
    parameters = None if shape is None else shape.parameters
    if not folder.is_dir():
        return Model(parameters, math.inf, chat=True)
    config = read_json(folder / "config.json") or {}
    settings = read_json(folder / "tokenizer_config.json")
    chat = settings is None or bool(settings.get("chat_template")) or (folder / "chat_template.jinja").is_file()
    return Model(parameters, positions_of(config.get("text_config") or config), chat)


def numbers_for(rows: int, model: Model, *, updates: int, cpu: bool) -> dict[str, str]:
    """The numbers of the configuration that depend on the problems, the model and the machine, as words of YAML.

    Args:
        updates: Optimizer steps for as many groups as a rollout has.
    """
    prompts = LEAST_PROMPTS
    while prompts < MOST_PROMPTS and rows >= 2 * prompts * STEPS_OF_A_PASS:
        prompts *= 2
    steps_of_a_pass = math.ceil(rows / prompts)
    passes = math.ceil(ENOUGH_STEPS / steps_of_a_pass)
    most, response = (MOST_TOKENS_ON_A_CPU, RESPONSE_ON_A_CPU) if cpu else (MOST_TOKENS, RESPONSE)
    if model.positions < most:
        most, response = int(model.positions), int(model.positions) // 2
    return {
        "prompts": str(prompts),
        "samples": str(GROUP * prompts // updates),
        "episodes": str(passes),
        "steps": str(passes * steps_of_a_pass),
        "rate": rate_for(model.parameters),
        "chat": str(model.chat).lower(),
        "most": str(most),
        "response": str(response),
        "room": str(most - response),
    }


def rate_for(parameters: int | None) -> str:
    """A learning rate for a model of so many parameters, with one digit."""
    rate = USUAL_RATE * max(USUAL_SIZE / (parameters or USUAL_SIZE), 1.0) ** EXPONENT
    return re.sub(r"e-0?", ".0e-", f"{min(rate, HIGHEST_RATE):.0e}")


def meant_for(name: str, model: Model, gpus: int, *, cpu: bool) -> str:
    """The model and the machine that the numbers are for, in words."""
    size = "" if model.parameters is None else f" ({_count(model.parameters)} parameters)"
    ranks = "" if gpus == 1 else f" in {gpus} processes"
    where = f"a CPU{ranks}" if cpu else f"{gpus} GPU{'s' * (gpus > 1)}"
    return f"{name}{size} on {where}"


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} billion" if number >= 5e8 else f"{number / 1e6:.3g} million"


def fitting_gpu(args: SimpleNamespace) -> str | None:
    """The memory of the smallest GPUs on which `plan` says that a configuration fits; None if that is not known."""
    shape, workload = shape_of_actor(args.actor.model_name_or_path), Workload(args)
    for kind, memory in GPUS.items() if shape is not None else ():
        needs = gpu_memory(shape, workload, constants_of(kind), workload.algorithm, workload.gpus)
        if needs.word == "fits":
            return memory
    return None
