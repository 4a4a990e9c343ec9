"""A model's shape, and the parameters and bytes that follow from it. Only for dense decoders."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bapo_openrlhf.errors import ConfigError
from bapo_openrlhf.launch.model_files import config_of
from bapo_openrlhf.user_file import at_home

BYTES = 2  # A weight, a key or a value in bf16.
TIED = ("gemma", "cohere", "smollm3")  # Model types whose embeddings are tied if config.json does not say it.


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder with grouped-query attention and a gated MLP."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False  # input and output embeddings are one matrix
    qkv_bias: bool = False  # the query, key and value projections have biases (Qwen2)
    qk_norm: bool = False  # queries and keys have a norm of their own (Qwen3)

    @property
    def sides(self) -> dict[str, tuple[int, int]]:
        """Width and height of each matrix of a layer, by the name that transformers gives it."""
        query, cache = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, query), "k_proj": (self.hidden, cache), "v_proj": (self.hidden, cache),
            "o_proj": (query, self.hidden), "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate), "down_proj": (self.intermediate, self.hidden),
        }  # fmt: skip

    @property
    def matrices(self) -> int:
        """Number of weights in one layer's matrices."""
        return sum(width * height for width, height in self.sides.values())

    @property
    def parameters(self) -> int:
        query, cache = self.heads * self.head_dim, self.kv_heads * self.head_dim
        small = 2 * self.hidden + self.qkv_bias * (query + 2 * cache) + self.qk_norm * 2 * self.head_dim
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * (self.matrices + small) + self.hidden

    def parameters_on(self, copies: int) -> int:
        """Parameters on the fullest of the `copies` GPUs that share a model by DeepSpeed's tensor parallelism.

        It cuts attention between key heads, the MLP between its units, and an untied output head between tokens.
        """
        kv_heads = math.ceil(self.kv_heads / copies)
        heads, intermediate = self.heads * kv_heads // self.kv_heads, math.ceil(self.intermediate / copies)
        part = replace(self, heads=heads, kv_heads=kv_heads, intermediate=intermediate)
        elsewhere = 0 if self.tied else self.vocabulary - math.ceil(self.vocabulary / copies)
        return part.parameters - elsewhere * self.hidden

    def adapter_parameters(self, rank: int, targets: Collection[str] | str) -> int:
        """Weights of LoRA adapters of `targets`: A has rank x width, and B height x rank (arXiv 2106.09685)."""
        adapted = self.sides if targets == "all-linear" else targets
        sizes = [sum(sides) for name, sides in self.sides.items() if name in adapted]
        return self.layers * rank * sum(sizes)

    @property
    def weight_bytes(self) -> int:
        return BYTES * self.parameters

    def activation_bytes(self, masked: int = 0) -> int:
        """Bytes that one layer keeps of one token for the backward pass, in bf16 (as in arXiv 2205.05198, Sec. 4.1).

        In transformers, each of the two norms keeps its input in fp32 and its result before and after its weight,
        attention keeps queries, keys, values and its result, and the MLP four arrays. Attention of padded samples,
        which have `masked` tokens, has a mask of all pairs of tokens, and repeats keys and values for each query head.
        """
        query, cache = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = 2 * (8 * self.hidden + 4)
        if self.qk_norm:
            norms += 6 * (query + cache) + 4 * (self.heads + self.kv_heads)
        attention = BYTES * (2 * query + 2 * (query if masked else cache) + masked) + 4 * self.heads
        return norms + attention + 4 * BYTES * self.intermediate

    @property
    def cache_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return 2 * BYTES * self.layers * self.kv_heads * self.head_dim


# From each model's published config.json.
SHAPES = {
    "0.6B": ModelShape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151936, tied=True, qk_norm=True),
    "1.5B": ModelShape("Qwen2.5-1.5B", 28, 1536, 12, 2, 128, 8960, 151936, tied=True, qkv_bias=True),
    "1.7B": ModelShape("Qwen3-1.7B", 28, 2048, 16, 8, 128, 6144, 151936, tied=True, qk_norm=True),
    "4B": ModelShape("Qwen3-4B", 36, 2560, 32, 8, 128, 9728, 151936, tied=True, qk_norm=True),
    "7B": ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True),
    "8B": ModelShape("Qwen3-8B", 36, 4096, 32, 8, 128, 12288, 151936, qk_norm=True),
    "14B": ModelShape("Qwen2.5-14B", 48, 5120, 40, 8, 128, 13824, 152064, qkv_bias=True),
    "32B": ModelShape("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064, qkv_bias=True),
    "70B": ModelShape("Llama-3-70B", 80, 8192, 64, 8, 128, 28672, 128256),
}


def shape_of_actor(actor: str | None) -> ModelShape | None:
    """The shape of `--actor.model_name_or_path`, a folder with a config.json, or one of SHAPES by name; or None."""
    if actor and at_home(actor).is_dir():
        return shape_of_folder("actor.model_name_or_path", at_home(actor))
    return next((shape for shape in SHAPES.values() if actor and shape.name == actor.rsplit("/", 1)[-1]), None)


def shape_of_folder(flag: str, folder: Path) -> ModelShape:
    """The shape that a model's own config.json gives; a ConfigError, which begins with `flag`, if it is not dense."""
    whole = config_of(f"{flag} is {folder}", folder)
    language: Mapping[str, Any] = whole.get("text_config") or whole  # The language part of a vision model.
    if any(key in language for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ConfigError(f"{flag} is {folder}, a mixture of experts; it must be a dense model")

    def size(name: str, default: int | None = None) -> int:
        value = language.get(name) if language.get(name) is not None else default
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{flag} {folder}: config.json has {name} {value!r}; it must be a whole number above 0")
        return value

    heads, kind = size("num_attention_heads"), str(language.get("model_type", whole.get("model_type", "")))
    return ModelShape(
        name=folder.name,
        layers=size("num_hidden_layers"),
        hidden=size("hidden_size"),
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", size("hidden_size") // heads),
        intermediate=size("intermediate_size"),
        vocabulary=size("vocab_size"),
        tied=bool(whole.get("tie_word_embeddings", language.get("tie_word_embeddings", kind.startswith(TIED)))),
        qkv_bias=kind.startswith("qwen2"),
        qk_norm=kind.startswith("qwen3"),
    )
