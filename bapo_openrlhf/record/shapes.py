"""What stands in the files of a record. A file in which something else stands is damaged, and must not be believed."""

import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], bool]
LARGEST = 1e300  # of the numbers in a record, so that they can be added up
PASS1 = re.compile(r"eval_(.+)_pass1")  # OpenRLHF's name of the mean reward of all answers to a data set


def whole(value: Any) -> bool:
    """A whole number."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63


def number(value: Any) -> bool:
    """A number, or null for NaN, infinity and what is not known."""
    return (
        value is None or isinstance(value, bool) or whole(value) or (isinstance(value, float) and abs(value) < LARGEST)
    )


def text(value: Any) -> bool:
    return isinstance(value, str)


def maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def anything(_value: Any) -> bool:
    return True


def map_of(check: Check, key: Check = anything) -> Check:
    """An object of any names, or of those that `key` allows."""
    return lambda value: isinstance(value, dict) and all(map(key, value)) and all(map(check, value.values()))


def fields(checks: Mapping[str, Check], *, required: tuple[str, ...] = ()) -> Check:
    """An object with the required names. Each known name has its check, and other names may have anything."""
    return lambda value: (
        isinstance(value, dict)
        and all(name in value for name in required)
        and all(checks.get(name, anything)(item) for name, item in value.items())
    )


_CHANGE = {"at": text, "step": whole, "flag": text, "before": anything, "now": anything}
_FLAGS = {"ckpt.path": text, "ckpt.save_steps": whole}  # those of a run that its next start reads
_END = {"how": text, "at": text, "status": whole, "text": text}
METADATA = fields({
    "name": text, "algorithm": text, "seed": whole, "started": text, "resumed": list_of(text),
    "total_steps": maybe(whole), "commit": maybe(text), "cpu": maybe(text), "command": text, "versions": map_of(text),
    "bf16_products": maybe(map_of(text, str.isdecimal)), "config": fields(_FLAGS), "inputs": map_of(text),
    "changed": list_of(fields(_CHANGE, required=tuple(_CHANGE))), "ended": fields(_END, required=tuple(_END)),
})  # fmt: skip
SUMMARY = fields({
    "algorithm": text, "seed": whole, "commit": maybe(text), "command": text, "versions": map_of(text),
    "steps": whole, "reward_start": number, "reward_end": number, "groups": map_of(number), "rollouts": whole,
    "seconds": map_of(number), "started": text, "finished": text,
    "nothing_trained": maybe(text),
})  # fmt: skip
ROW = fields({"step": whole}, required=("step",))  # of any file
_OF_GROUP = {"step": whole, "prompt": text, "source": text, "state": text, "mean": number, "responses": whole}
GROUP = fields(_OF_GROUP | {"uid": whole, "tokens": number}, required=tuple(_OF_GROUP))
_OF_ANSWER = {"step": whole, "prompt": text, "kind": text, "text": text, "response": text}
ANSWER = fields(_OF_ANSWER | {"reward": number}, required=tuple(_OF_ANSWER))
WARNING = fields({"step": whole, "kind": text, "text": text}, required=("step", "kind", "text"))


def numbers(row: Any) -> bool:
    """Whether a row has a step, and numbers under names with a slash. Others are OpenRLHF's or a reward function's."""
    return ROW(row) and all(number(value) for name, value in row.items() if "/" in name)


def scores(row: Mapping[str, Any]) -> dict[str, float]:
    """The mean reward of each data set in a row of evaluations.jsonl."""
    return {match[1]: value for name, value in row.items() if (match := PASS1.fullmatch(name)) and value is not None}


def evaluation(row: Any) -> bool:
    """Whether a row has a step, and numbers as its scores."""
    return numbers(row) and all(map(number, scores(row).values()))
