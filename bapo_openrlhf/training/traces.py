"""Traces: responses that another model wrote, from a file to the token ids that a method is given.

Each line is {"prompt": ..., "response": "..."}: a prompt as the data's input column has it, and a text. OpenRLHF's
generator would have the same tokens had the policy written it: the response's own tokens, with no others before them
but the prompt's, and the end token after them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
from openrlhf.datasets.prompts_dataset import preprocess_data
from openrlhf.utils.logging_utils import init_logger

logger = init_logger(__name__)


def tokens_of(
    traces: Mapping[str, str], known: Collection[str], tokenizer: Any, args: SimpleNamespace
) -> dict[str, np.ndarray]:
    """Token ids of the traces that can be used, int32 (A,), by the prompt's text as the rollout engine gets it.

    Those of prompts that are not in the data, and those that are longer than a generated response can be, are left out
    and counted in the log.

    Args:
        traces: as `preflight.read_traces` gives them.
        known: texts of the data's prompts.
    """
    template = tokenizer.apply_chat_template if args.data.apply_chat_template else None
    found: dict[str, np.ndarray] = {}
    unknown = too_long = 0
    for prompt, response in traces.items():
        row = {"input": json.loads(prompt)}
        text, _ = preprocess_data(row, args.data.input_template, "input", None, template)
        if text not in known:
            unknown += 1
            continue
        ids = _ids(tokenizer, response)
        if ids[-1:] != [tokenizer.eos_token_id]:
            ids = [*ids, tokenizer.eos_token_id]
        room = args.rollout.max_new_tokens or args.data.max_len - len(_ids(tokenizer, text))
        if len(ids) > room:
            too_long += 1
            continue
        found[text] = np.array(ids, dtype=np.int32)
    logger.info(
        f"traces of {len(found)} prompts; left out: {unknown} of prompts that are not in the data, {too_long} that are "
        "too long"
    )
    return found


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text=text, add_special_tokens=False)["input_ids"])
