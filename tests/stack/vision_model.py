"""A Qwen2.5-VL with random weights, and drawn problems: what the vision tests train. A script: vision_model.py FOLDER

It needs torchvision, or the stand-in for it (vision_torchvision.py).
"""

import io
import json
import sys
from pathlib import Path

import torch
from PIL import Image
from preset_models import CHARACTERS, SPECIAL, VISION, make_tokenizer, save_processor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from bapo_openrlhf.tasks import geometry


def make_model(tokenizer):
    """Images change what it says, and it says no placeholder of an image: OpenRLHF could not train on that."""
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    start, end, image, video = tokenizer.convert_tokens_to_ids(VISION)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
            "pad_token_id": pad, "bos_token_id": None, "eos_token_id": eos, "tie_word_embeddings": False,
        },
        vision_config={
            "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "out_hidden_size": 64,
            "window_size": 56, "fullatt_block_indexes": [1],
        },
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
        tie_word_embeddings=False, pad_token_id=pad, bos_token_id=None, eos_token_id=eos,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:  # larger than usual: of an image much has to arrive
                weight.normal_(std=weight[0].numel() ** -0.5)
        # The first feature is the same for all words, and speaks only against placeholders.
        words, head = model.model.language_model.embed_tokens.weight, model.lm_head.weight
        words[:, 0], head[:, 0] = 8.0, 0.0
        head[[start, end, image, video], 0] = -10.0
    return model.to(torch.bfloat16)


def main(folder):
    """FOLDER/model, and FOLDER/data.jsonl: 32 problems, labels from always to never solved (see reward.py)."""
    tokenizer = make_tokenizer(len(SPECIAL) + len(CHARACTERS))
    make_model(tokenizer).save_pretrained(folder / "model")
    save_processor(tokenizer, folder / "model")
    (folder / "images").mkdir()
    with (folder / "data.jsonl").open("w") as file:
        for number, problem in enumerate(geometry.generate("drawn", "train", 32, seed=0)):
            path = folder / "images" / f"{number}.png"
            figure = Image.open(io.BytesIO(problem.images[0]))
            colour = Image.new("RGB", figure.size, tuple(prime * number % 256 for prime in (97, 53, 151)))
            Image.blend(figure, colour, 0.8).save(path)
            label = str((8, 4, 4, 2, 2, 0)[number % 6])
            file.write(json.dumps({"input": problem.text, "label": label, "images": [str(path)]}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
