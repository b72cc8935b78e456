"""Small random GPT-OSS checkpoints, the same bits on every machine, in every layout found in the wild.

Needs NumPy and tokenizers only, so that the script which writes the goldens uses it too.
Quantised matrices are drawn as codes and scales, so no quantiser is needed to make them.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

WINDOW = 8
ORIGINAL_CONTEXT = 16
PROMPT_LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW)
HIDDEN, INTERMEDIATE, HEAD, QUERIES, KEYS, EXPERTS, LAYERS = 64, 96, 16, 4, 2, 4, 4
CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
VOCABULARY = 256 + len(CONTROL_TOKENS)

LAYOUTS = (
    "transformers",
    "transformers-4.57",
    "publisher",
    "mlx",
    "mlx-affine-4",
    "mlx-affine-8",
    "mlx-mixed",
    "mlx-mxfp4-q8",
)
"""Each with the model ``yarn``; the others come in the first layout only."""

MODELS: dict[str, dict[str, Any]] = {
    "yarn": {},
    "rounded": {
        "rope_parameters": {"truncate": True, "beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 1.25},
        "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
    "plain": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "swiglu_alpha": 1.5,
        "swiglu_limit": 0.5,
        "num_experts_per_tok": 3,
    },
}

_AFFINE = {"mlx-affine-4": (4, 64), "mlx-affine-8": (8, 32), "mlx-mixed": (4, 32)}
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_VALUES = np.concatenate([_FP4, -_FP4])

Stored = dict[str, tuple[str, np.ndarray]]
"""A tensor's name to the format's word for its dtype and its values (BF16 as float32 that fits)."""


def prompt() -> list[int]:
    """The longest prompt; the others are its beginnings."""
    return np.random.RandomState(5).randint(0, 256, max(PROMPT_LENGTHS)).tolist()


def far_prompt() -> tuple[list[int], list[int]]:
    """A prompt of many times the original context, and the positions of it that are compared."""
    ids = np.random.RandomState(6).randint(0, 256, 1500).tolist()
    return ids, [*range(99, 1500, 100)]


def config(model: str, layout: str) -> dict[str, Any]:
    """``config.json`` as the layout's writer would have it."""
    changes = dict(MODELS[model])
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": ORIGINAL_CONTEXT,
        "truncate": False,
    }
    changed = changes.pop("rope_parameters", {})
    rope = changed if changed.get("rope_type") == "default" else rope | changed
    written: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "dtype": "float32",
        "eos_token_id": VOCABULARY - 7,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "max_position_embeddings": 4096,
        "model_type": "gpt_oss",
        "num_attention_heads": QUERIES,
        "num_experts_per_tok": 2,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KEYS,
        "num_local_experts": EXPERTS,
        "rms_norm_eps": 1e-05,
        "rope_parameters": rope,
        "sliding_window": WINDOW,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCABULARY,
        **changes,
    }
    if layout not in ("transformers", "mlx"):
        written |= {"rope_scaling": written.pop("rope_parameters"), "torch_dtype": written.pop("dtype")}
        written["rope_theta"] = written["rope_scaling"].pop("rope_theta")
    if layout == "publisher":
        written |= {"experts_per_token": 2, "initial_context_length": ORIGINAL_CONTEXT}
        written["quantization_config"] = {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
            "quant_method": "mxfp4",
        }
    if layout.startswith("mlx-"):
        written["quantization"] = written["quantization_config"] = _quantization(layout)
    return written


def _quantization(layout: str) -> dict[str, Any]:
    """As ``mlx_lm.convert`` writes it: a default, and what differs from it by module."""
    if layout == "mlx-mxfp4-q8":
        fields: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        eight = {"group_size": 64, "bits": 8, "mode": "affine"}
        return fields | {path: eight for path, _ in _matrices() if ".experts." not in path}
    bits, group_size = _AFFINE[layout]
    fields = {"group_size": group_size, "bits": bits}
    if layout == "mlx-affine-4":
        fields |= {path: {"group_size": 64, "bits": 8} for path, _ in _matrices() if "router" in path}
    if layout == "mlx-mixed":
        fields["model.embed_tokens"] = {"group_size": 32, "bits": 6}
        fields["lm_head"] = False
        fields["model.layers.0.self_attn.q_proj"] = {"group_size": 64, "bits": 8}
        fields["model.layers.1.self_attn.o_proj"] = False
        fields["model.layers.2.mlp.experts.down_proj"] = {"group_size": 32, "bits": 8}
    return fields


def packing(layout: str, path: str) -> dict[str, Any] | None:
    """How the matrix ``path`` is quantised in ``layout``, or None."""
    if layout == "publisher":
        return {"mode": "mxfp4", "bits": 4, "group_size": 32} if ".experts." in path else None
    if not layout.startswith("mlx-"):
        return None
    fields = _quantization(layout)
    default = {name: fields[name] for name in ("group_size", "bits", "mode") if name in fields}
    found = fields.get(path, default)
    # an intermediate size of 96 has no groups of 64: mlx-lm leaves such a matrix as it is
    if found and dict(_matrices())[path][-1] % found["group_size"]:
        return None
    return {"mode": "affine", **found} if found else None


def _matrices() -> list[tuple[str, tuple[int, ...]]]:
    """Path and shape of every matrix, in the MLX community's naming."""
    found: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens", (VOCABULARY, HIDDEN)),
        ("lm_head", (VOCABULARY, HIDDEN)),
    ]
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        found += [
            (f"{layer}.self_attn.q_proj", (QUERIES * HEAD, HIDDEN)),
            (f"{layer}.self_attn.k_proj", (KEYS * HEAD, HIDDEN)),
            (f"{layer}.self_attn.v_proj", (KEYS * HEAD, HIDDEN)),
            (f"{layer}.self_attn.o_proj", (HIDDEN, QUERIES * HEAD)),
            (f"{layer}.mlp.router", (EXPERTS, HIDDEN)),
            (f"{layer}.mlp.experts.gate_proj", (EXPERTS, INTERMEDIATE, HIDDEN)),
            (f"{layer}.mlp.experts.up_proj", (EXPERTS, INTERMEDIATE, HIDDEN)),
            (f"{layer}.mlp.experts.down_proj", (EXPERTS, HIDDEN, INTERMEDIATE)),
        ]
    return found


def _draw(layout: str) -> tuple[Stored, dict[str, np.ndarray]]:
    """The tensors in the MLX community's naming, as stored and as the float32 numbers they stand for."""
    random = np.random.RandomState(20)
    stored: Stored = {}
    dense: dict[str, np.ndarray] = {}

    def plain(name: str, values: np.ndarray) -> None:
        # numbers that bfloat16 holds exactly, so that one draw serves each dtype
        fitting = (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
        stored[name] = ("BF16" if layout == "publisher" else "F32", fitting)
        dense[name] = fitting

    for path, shape in _matrices():
        found = packing(layout, path)
        if found is None:
            plain(f"{path}.weight", random.standard_normal(shape) * 1.5 / np.sqrt(shape[-1]))
        elif found["mode"] == "mxfp4":
            groups = (*shape[:-1], shape[-1] // 32)
            codes = random.randint(0, 256, (*groups, 16)).astype(np.uint8)
            scales = random.randint(121, 125, groups).astype(np.uint8)
            stored[f"{path}.weight"] = ("U32", codes.view(np.uint32).reshape(*shape[:-1], shape[-1] // 8))
            stored[f"{path}.scales"] = ("U8", scales)
            dense[f"{path}.weight"] = decode_mxfp4(codes, scales)
        else:
            bits, group_size = found["bits"], found["group_size"]
            groups = (*shape[:-1], shape[-1] // group_size)
            words = random.randint(0, 1 << 32, (*shape[:-1], shape[-1] * bits // 32), dtype=np.uint32)
            scales = ((1 + random.random_sample(groups)) * 0.25 / (1 << bits)).astype(np.float32)
            biases = (-scales * (1 << bits) * random.uniform(0.45, 0.55, groups)).astype(np.float32)
            stored[f"{path}.weight"] = ("U32", words)
            stored[f"{path}.scales"], stored[f"{path}.biases"] = ("F32", scales), ("F32", biases)
            dense[f"{path}.weight"] = decode_affine(words, scales, biases, bits)
        if path not in ("model.embed_tokens", "lm_head"):
            plain(f"{path}.bias", random.standard_normal(shape[:-1]) * 0.2)
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        plain(f"{layer}.self_attn.sinks", random.standard_normal(QUERIES))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain(f"{layer}.{norm}.weight", random.uniform(0.5, 1.5, HIDDEN))
    plain("model.norm.weight", random.uniform(0.5, 1.5, HIDDEN))
    return stored, dense


def decode_mxfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """OCP microscaling: ``codes [..., groups, 16]`` of two weights each, low half first; ``scales`` are exponents."""
    halves = np.stack([codes & 0x0F, codes >> 4], axis=-1).reshape(*codes.shape[:-1], 32)
    values = np.ldexp(_FP4_VALUES[halves], scales[..., None].astype(np.int32) - 127)
    return values.reshape(*scales.shape[:-1], -1).astype(np.float32)


def decode_affine(words: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> np.ndarray:
    """MLX's affine format: a stream of ``bits``-bit numbers, the low ones first; ``scale x number + bias``."""
    rows = np.ascontiguousarray(words).view(np.uint8)
    stream = np.unpackbits(rows, axis=-1, bitorder="little")
    numbers = stream.reshape(*stream.shape[:-1], -1, bits) @ (1 << np.arange(bits))
    grouped = numbers.reshape(*scales.shape, -1).astype(np.float32)
    return (grouped * scales[..., None] + biases[..., None]).reshape(numbers.shape).astype(np.float32)


def dense_tensors(layout: str) -> dict[str, np.ndarray]:
    """What the checkpoint's weights are worth, float32, under the names of ``transformers``."""
    return _joined(_draw(layout)[1])


def _joined(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gate and up as one, interleaved; matrices of experts with the input dimension first."""
    joined = {}
    for name, values in tensors.items():
        base, _, rest = name.rpartition("experts.")
        if not base:
            joined[name] = values
            continue
        path, _, kind = rest.partition(".")
        suffix = {"weight": "", "bias": "_bias"}[kind]
        if path == "gate_proj":
            both = np.stack([values, tensors[f"{base}experts.up_proj.{kind}"]], axis=2)
            values = both.reshape(values.shape[0], 2 * values.shape[1], *values.shape[2:])
        elif path == "up_proj":
            continue
        stem = "down_proj" if path == "down_proj" else "gate_up_proj"
        joined[f"{base}experts.{stem}{suffix}"] = np.swapaxes(values, 1, 2) if kind == "weight" else values
    return joined


def _published(stored: Stored) -> Stored:
    """MXFP4 as the publisher stores it: gate and up rows interleaved, 16 bytes to a group."""
    published: Stored = {}
    for name, (dtype, values) in stored.items():
        base, _, rest = name.rpartition("experts.")
        path, _, kind = rest.partition(".")
        if not base:
            published[name] = (dtype, values)
            continue
        if path == "up_proj":
            continue
        if path == "gate_proj":
            both = np.stack([values, stored[f"{base}experts.up_proj.{kind}"][1]], axis=2)
            values = both.reshape(values.shape[0], 2 * values.shape[1], *values.shape[2:])
        if kind == "weight":
            values = np.ascontiguousarray(values).view(np.uint8).reshape(*values.shape[:-1], -1, 16)
            dtype = "U8"
        suffix = {"weight": "_blocks", "scales": "_scales", "bias": "_bias"}[kind]
        published[f"{base}experts.{'down_proj' if path == 'down_proj' else 'gate_up_proj'}{suffix}"] = (
            dtype,
            values,
        )
    return published


def tensors(layout: str) -> Stored:
    """The checkpoint's tensors under the layout's names."""
    stored, dense = _draw(layout)
    if layout.startswith("mlx"):
        return stored
    if layout == "publisher":
        return _published(stored)
    return {name: ("F32", values) for name, values in _joined(dense).items()}


def write(folder: Path, model: str, layout: str, shards: int = 1) -> Path:
    """Write the whole checkpoint into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model, layout)))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCABULARY - 1]}))
    write_tokenizer(folder)
    stored = tensors(layout)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", stored)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(stored.items())[shard::shards])
        write_safetensors(folder / file, part)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_tokenizer(folder: Path) -> None:
    """Bytes, and the harmony tokens after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    added = [
        {"id": 256 + index, "content": token, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for index, token in enumerate(CONTROL_TOKENS)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    definition = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))


def write_safetensors(file: Path, stored: Stored) -> None:
    """The format itself: a length, a JSON header, the bytes."""
    header: dict[str, Any] = {}
    data = bytearray()
    for name, (dtype, values) in stored.items():
        raw = np.ascontiguousarray(values)
        if dtype == "BF16":
            raw = (raw.view(np.uint32) >> 16).astype(np.uint16)
        start = len(data)
        data += raw.tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
