"""Token ids of traces. A trace is a response that another model wrote.

Each line of a file of traces is {"prompt": ..., "response": "..."}. The prompt is as in the data's input column, and
the response is a text. A trace gets the token ids that OpenRLHF's generator would have if the policy had written it:
those of the response, which follow the prompt's directly, and then the end token.
"""

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
    """Token ids of the traces that can be used, int32, shape (A,), by the text that the rollout engine gets as prompt.

    A trace is left out if its prompt is not in the data, or if it is longer than a generated response can be. The log
    says how many traces are left out.

    Args:
        traces: Responses by the prompt as JSON, see `data_files.read_traces`.
        known: Texts of the data's prompts.
        tokenizer: Tokenizer of the model.
        args: Arguments of the run.
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
