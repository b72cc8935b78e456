"""Small random Qwen3 checkpoints, the same bytes every time, in each layout that the family reads.

``LAYOUTS`` names them. A checkpoint has everything that a real one has but sense: what it
says is noise. ``dense_tensors`` is what its tensors stand for, for a reference that knows
one layout only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LAYOUTS = ("transformers", "publisher", "mlx")
PROMPT_TOKENS = 1300

HIDDEN, MLP, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 64, 128, 3, 4, 2, 32
VOCABULARY = 280  # a little more than the tokenizer has, as in real checkpoints
CONTROL_TOKENS = {  # name: whether the tokenizer calls it special, as Qwen's does
    "<|endoftext|>": True,
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<tool_response>": False,
    "</tool_response>": False,
    "<think>": False,
    "</think>": False,
}
END_ID = 256 + list(CONTROL_TOKENS).index("<|im_end|>")

_GROUP = 64
_EIGHT_BIT = "model.layers.1.mlp.down_proj"
_NOT_QUANTIZED = "model.layers.0.self_attn.k_proj"

TEMPLATE = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\n' }}{% endif %}
    {{- 'Tools:\n' }}
    {%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
    {{- 'Call one as <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.role != 'system' or not loop.first %}
        {{- '<|im_start|>' + message.role + '\n' }}
        {%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""


def prompt() -> list[int]:
    """Token ids of the one long prompt that the golden logits are of."""
    return np.random.default_rng(11).integers(0, VOCABULARY, PROMPT_TOKENS).tolist()


def write(folder: Path, layout: str) -> Path:
    """Write the checkpoint in ``layout`` into ``folder``, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config(layout))
    _write_json(
        folder / "generation_config.json", {"eos_token_id": [END_ID], "temperature": 0.6, "top_p": 0.95}
    )
    _write_json(folder / "tokenizer.json", _tokenizer())
    tokenizer_config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    tensors = _stored_tensors(layout)
    if layout == "publisher":  # several files and an index
        _write_shards(folder, tensors)
    else:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def config(layout: str) -> dict[str, Any]:
    """``config.json`` of a layout. One of them ties its head to the embedding."""
    fields: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": END_ID,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": MLP,
        "max_position_embeddings": 4096,
        "max_window_layers": LAYERS,
        "model_type": "qwen3",
        "num_attention_heads": Q_HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-06,
        "sliding_window": None,
        "tie_word_embeddings": layout == "publisher",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCABULARY,
    }
    if layout == "transformers":
        rope = {"rope_theta": 1000000.0, "rope_type": "default"}
        return {
            **fields,
            "dtype": "float32",
            "layer_types": ["full_attention"] * LAYERS,
            "rope_parameters": rope,
        }
    fields |= {"torch_dtype": "float32", "rope_theta": 1000000, "rope_scaling": None}
    if layout == "mlx":
        table = {"group_size": _GROUP, "bits": 4, _EIGHT_BIT: {"group_size": _GROUP, "bits": 8}}
        table[_NOT_QUANTIZED] = False
        fields |= {"quantization": table, "quantization_config": table}
    return fields


def dense_tensors(layout: str) -> dict[str, np.ndarray]:
    """Every tensor as a float32 matrix, under the names of ``transformers``."""
    tensors = _stored_tensors(layout)
    for module in [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]:
        words, scales, biases = (tensors.pop(f"{module}.{part}") for part in ("weight", "scales", "biases"))
        bits = _bits(module)
        shifts = np.arange(0, 32, bits, dtype=np.uint32)
        integers = (words[..., None] >> shifts & np.uint32(2**bits - 1)).reshape(words.shape[0], -1)
        each = integers.reshape(*scales.shape, _GROUP).astype(np.float32)
        tensors[f"{module}.weight"] = (each * scales[..., None] + biases[..., None]).reshape(integers.shape)
    return tensors


def _stored_tensors(layout: str) -> dict[str, np.ndarray]:
    random = np.random.default_rng(LAYOUTS.index(layout))
    tensors: dict[str, np.ndarray] = {}

    def norm(name: str, size: int, least: float, most: float) -> None:
        tensors[f"{name}.weight"] = random.uniform(least, most, size).astype(np.float32)

    def matrix(name: str, rows: int, columns: int) -> None:
        if layout != "mlx" or name == _NOT_QUANTIZED:
            values = random.normal(0, columns**-0.5, (rows, columns))
            tensors[f"{name}.weight"] = values.astype(np.float32)
            return
        bits, groups = _bits(name), columns // _GROUP
        words = random.integers(0, 2**32, (rows, columns * bits // 32), dtype=np.uint32)
        deviation = 2**bits / 12**0.5  # of integers that are equally likely
        scales = random.uniform(0.5, 1.5, (rows, groups)) * columns**-0.5 / deviation
        biases = -scales * (2**bits - 1) / 2
        tensors[f"{name}.weight"] = words
        tensors[f"{name}.scales"] = scales.astype(np.float32)
        tensors[f"{name}.biases"] = biases.astype(np.float32)

    matrix("model.embed_tokens", VOCABULARY, HIDDEN)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        norm(f"{layer}.input_layernorm", HIDDEN, 0.5, 1.5)
        matrix(f"{layer}.self_attn.q_proj", Q_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{layer}.self_attn.k_proj", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{layer}.self_attn.v_proj", KV_HEADS * HEAD_DIM, HIDDEN)
        matrix(f"{layer}.self_attn.o_proj", HIDDEN, Q_HEADS * HEAD_DIM)
        norm(f"{layer}.self_attn.q_norm", HEAD_DIM, 1.0, 2.0)  # large enough that attention chooses
        norm(f"{layer}.self_attn.k_norm", HEAD_DIM, 1.0, 2.0)
        norm(f"{layer}.post_attention_layernorm", HIDDEN, 0.5, 1.5)
        matrix(f"{layer}.mlp.gate_proj", MLP, HIDDEN)
        matrix(f"{layer}.mlp.up_proj", MLP, HIDDEN)
        matrix(f"{layer}.mlp.down_proj", HIDDEN, MLP)
    norm("model.norm", HIDDEN, 0.5, 1.5)
    if layout != "publisher":
        matrix("lm_head", VOCABULARY, HIDDEN)
    return tensors


def _bits(module: str) -> int:
    return 8 if module == _EIGHT_BIT else 4


def _write_shards(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[:12], names[12:]), start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _tokenizer() -> dict[str, Any]:
    """Byte-level BPE without merges: token ``n`` is byte ``n``; then come the control tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))  # the characters by which byte-level BPE writes all other bytes
    characters = [chr(byte) if byte in printable else chr(next(others)) for byte in range(0x100)]
    added = [
        {"id": 256 + index, "content": name, "special": special, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for index, (name, special) in enumerate(CONTROL_TOKENS.items())
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(characters)},
            "merges": [],
        },
    }


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
