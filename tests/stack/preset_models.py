"""The models and data of configs/*.yaml without their weights: config.json, and a tokenizer of the true vocabulary.

The sizes are those of the published config.json. A script: preset_models.py PRESET FOLDER
For images it needs torchvision, or the stand-in for it (vision_torchvision.py).
"""

import json
import sys
from pathlib import Path

import transformers
import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from bapo_openrlhf.tasks import geometry

CONFIGS = Path(__file__).parents[2] / "configs"
# layers, width, heads, keys, width of the MLP, vocabulary, whether input and output embeddings are tied
SIZES = {
    "Qwen/Qwen3-0.6B": (28, 1024, 16, 8, 3072, 151936, True),
    "Qwen/Qwen3-4B": (36, 2560, 32, 8, 9728, 151936, True),
    "Qwen/Qwen3-8B": (36, 4096, 32, 8, 12288, 151936, False),
    "Qwen/Qwen2.5-Math-1.5B": (28, 1536, 12, 2, 8960, 151936, True),
    "Qwen/Qwen2.5-Math-7B": (28, 3584, 28, 4, 18944, 152064, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (28, 1536, 12, 2, 8960, 151936, False),
    "Qwen/Qwen2.5-VL-3B-Instruct": (36, 2048, 16, 2, 11008, 151936, True),
    "Qwen/Qwen2.5-VL-7B-Instruct": (28, 3584, 28, 4, 18944, 152064, False),
}
PAD, EOS, UNKNOWN = "<pad>", "<|im_end|>", "<unk>"
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL = [PAD, EOS, UNKNOWN, "<|im_start|>", *VISION]
CHARACTERS = [*map(chr, range(32, 127)), "\n", "°"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(size):
    """One token a character, and as many others as the vocabulary has."""
    tokens = [*SPECIAL, *CHARACTERS]
    tokens += [f"<word{number}>" for number in range(size - len(tokens))]
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens(SPECIAL)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )  # fmt: skip


def config_of(name):
    layers, width, heads, keys, mlp, vocabulary, tied = SIZES[name]
    sizes = {
        "num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": keys,
        "intermediate_size": mlp, "vocab_size": vocabulary, "tie_word_embeddings": tied, "eos_token_id": 1,
        "max_position_embeddings": 32768,
    }  # fmt: skip
    if "-VL-" in name:
        rope = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
        return transformers.Qwen2_5_VLConfig(
            text_config=sizes | {"rope_parameters": rope, "pad_token_id": 0, "bos_token_id": None},
            vision_config={"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
                           "out_hidden_size": width},
            **{f"{name}_token_id": SPECIAL.index(token) for name, token in zip(
                ("vision_start", "vision_end", "image", "video"), VISION, strict=True)},
            tie_word_embeddings=tied,
        )  # fmt: skip
    if "Qwen3" in name:
        return transformers.Qwen3Config(**sizes, head_dim=128)
    return transformers.Qwen2Config(**sizes)


def make_model(name, folder):
    """A folder with config.json, the tokenizer and, for images, the processor."""
    config = config_of(name)
    config.save_pretrained(folder)
    tokenizer = make_tokenizer(config.get_text_config().vocab_size)
    tokenizer.save_pretrained(folder)
    if "-VL-" in name:
        save_processor(tokenizer, folder)


def save_processor(tokenizer, folder):
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    images = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 56 * 56, "longest_edge": geometry.SIZE**2})
    parts = {"image_processor": images, "tokenizer": tokenizer, "video_processor": Qwen2VLVideoProcessor()}
    transformers.Qwen2_5_VLProcessor(**parts, chat_template=TEMPLATE).save_pretrained(folder)


def make_data(folder, task, images):
    """As many short rows of a task as a rollout of the presets takes. With images they have one of six each."""
    rows = []
    for number in range(256):
        label = f"{number} 2:{number + 2}" if task == "countdown" else str(number + 2)
        row = {"input": f"{number} + 2 = ?", "label": label}
        if images:
            from PIL import Image

            path = folder / f"{number % 6}.png"
            if number < 6:
                Image.new("RGB", (84, 84), (40 * number, 200 - 30 * number, 9)).save(path)
            row |= {"input": f"<image>{row['input']}", "images": [str(path)]}
        rows.append(row)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(preset, folder):
    """FOLDER/model and FOLDER/data.jsonl for a preset of configs/."""
    settings = yaml.safe_load((CONFIGS / f"{preset}.yaml").read_text())
    make_model(settings["actor"]["model_name_or_path"], folder / "model")
    task = Path(settings["reward"]["remote_url"]).stem
    make_data(folder, task, images="max_images_per_prompt" in settings["data"])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve())
