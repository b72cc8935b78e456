"""Small random Gemma 4 checkpoints, the same bits on every machine, in every layout found in the wild.

Needs NumPy and safetensors only, so that the script which writes the goldens uses it too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

WINDOW = 8
VOCABULARY = 120
PROMPT_LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW)
LAYOUTS = ("publisher", "transformers", "transformers-text", "mlx", "mlx-text", "older-names")
MODELS = ("moe", "dense", "edge")
PICTURES = {"moe": ((6, 6), (3, 9)), "edge": ((9, 3), (3, 3)), "demo": ((12, 9), (6, 6))}
"""For each checkpoint whose tower is tested, (columns, rows) of patches of some pictures."""
CONTROL_TOKENS = (
    *(
        "<pad>",
        "<eos>",
        "<bos>",
        "<unk>",
        "<mask>",
        "<|turn>",
        "<turn|>",
        "<|image>",
        "<image|>",
        "<|image|>",
    ),
    *("<|video|>", "<|audio>", "<audio|>", "<|audio|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>"),
    *("<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
)

_SLIDING, _FULL = "sliding_attention", "full_attention"
_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "dtype": "float32",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "rope_parameters": {
        _FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        _SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
    },
}
_TEXT: dict[str, dict[str, Any]] = {
    # As 26B-A4B: experts beside a dense MLP, K = V in full layers, spans that see both ways.
    "moe": {
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 0,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        "moe_intermediate_size": 64,
        "num_experts": 6,
        "num_global_key_value_heads": 1,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 0,
        "top_k_experts": 2,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
    },
    # As 31B.
    "dense": {
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 0,
        "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        "moe_intermediate_size": None,
        "num_experts": None,
        "num_global_key_value_heads": 2,
        "num_key_value_heads": 4,
        "num_kv_shared_layers": 0,
        "top_k_experts": None,
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
    },
    # As E2B: inputs per layer, later layers that borrow K and V and have an MLP twice as wide.
    "edge": {
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 32,
        "layer_types": [_SLIDING, _FULL, _SLIDING, _SLIDING, _FULL, _SLIDING, _FULL],
        "moe_intermediate_size": None,
        "num_experts": None,
        "num_global_key_value_heads": None,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 3,
        "top_k_experts": None,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
    },
}
_VISION: dict[str, Any] = {
    "head_dim": 12,
    "hidden_size": 48,
    "intermediate_size": 64,
    "model_type": "gemma4_vision",
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 16,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"},
}


def vision_config(model: str) -> dict[str, Any]:
    """The small models clip inside the tower, the others standardise what comes out of it."""
    return {**_VISION, "standardize": model != "edge", "use_clipped_linears": model == "edge"}


def pictures(sizes: tuple[tuple[int, int], ...], seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Random pictures of (columns, rows) patches: patches ``[N, P, 768]`` and positions ``[N, P, 2]``, padded with -1."""
    random, most = np.random.RandomState(seed), max(columns * rows for columns, rows in sizes)
    patches = random.random_sample((len(sizes), most, 768)).astype(np.float32)
    positions = np.full((len(sizes), most, 2), -1, np.int32)
    for number, (columns, rows) in enumerate(sizes):
        grid = [(column, row) for row in range(rows) for column in range(columns)]
        positions[number, : len(grid)] = grid
        patches[number, len(grid) :] = 0
    return patches, positions


BEGIN, END, IMAGE, VIDEO = (
    CONTROL_TOKENS.index(each) for each in ("<|image>", "<image|>", "<|image|>", "<|video|>")
)

# What stands in a prompt for a random checkpoint: a number of text tokens, "touch" for a picture that follows
# another without anything between them, or kind, columns and rows of patches of one picture.
MEDIA_PROMPTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "one image": ("moe", (4, ("image", 6, 6), 5)),
    "two images": ("moe", (2, ("image", 6, 6), 1, ("image", 3, 9), 6)),
    "touching images": ("moe", (3, ("image", 6, 6), "touch", ("image", 3, 9), 6)),
    "longer than the window": ("moe", (2, ("image", 12, 9), 7)),
    "across window borders": ("moe", (13, ("image", 6, 6), 3, ("image", 9, 6), 12, ("image", 6, 3), 9)),
    "image and video": (
        "dense",
        (4, ("image", 6, 6), 3, ("video", 6, 3), 2, ("video", 6, 3), 2, ("image", 3, 3), 5),
    ),
    "five frames": ("edge", (3, *(each for _ in range(5) for each in (2, ("video", 6, 3))), 6)),
    "inputs per layer": (
        "edge",
        (4, ("image", 6, 6), 3, ("video", 6, 3), 2, ("video", 6, 3), 12, ("image", 3, 9), 5),
    ),
}


def media_prompt(
    parts: tuple[Any, ...],
) -> tuple[list[int], list[tuple[int, int]], list[tuple[str, tuple[int, int]]]]:
    """Token ids, (start, length) of each picture's soft tokens, and its kind and (columns, rows)."""
    random, ids = np.random.RandomState(17), [2]
    places: list[tuple[int, int]] = []
    kinds: list[tuple[str, tuple[int, int]]] = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            ids += random.randint(len(CONTROL_TOKENS), VOCABULARY, part).tolist()
        elif part != "touch":
            kind, columns, rows = part
            touches = parts[number - 1] == "touch", parts[number + 1] == "touch"
            ids += [] if touches[0] else [BEGIN]
            places.append((len(ids), columns * rows // 9))
            kinds.append((kind, (columns, rows)))
            ids += [IMAGE if kind == "image" else VIDEO] * places[-1][1]
            ids += [] if touches[1] else [END]
    return ids, places, kinds


PHOTOGRAPHS = (
    (240, 240),
    (97, 311),
    (480, 640),
    (768, 768),
    (16, 1000),
    (1000, 16),
    (1, 1),
    (600, 1100),
    (384, 384),
)
"""(height, width) of pictures that the processor is tested with."""


def photograph(height: int, width: int) -> np.ndarray:
    """``[height, width, 3]``: smooth shades with sharp edges and grain, the same on every machine."""
    rows, columns = np.mgrid[:height, :width]
    grain = (rows * 7919 + columns * 104729) % 61
    shades = [
        (rows * 3 + columns) % 256,
        (columns * 5 + grain) % 256,
        (rows // 17 % 2 * 120 + columns // 23 % 2 * 90),
    ]
    return np.stack(shades, axis=-1).astype(np.uint8)


_FRAMES = [(second, "red" if second < 2 else "green", "white") for second in range(5)]
_MORE_FRAMES = [(0, "blue", "white"), (2, "blue", "white"), (61, "pink", "white")]
DEMO_MEDIA: dict[str, tuple[str, tuple[Any, ...]]] = {
    "one image": ("{}What colour is the shape?", (("red", "blue"),)),
    "two images": ("{}{}Which colours are the shapes, in order?", (("green", "white"), ("yellow", "black"))),
    "in the middle": (
        "The secret word is marble. {filler}{}{filler}What is the secret word?",
        (("cyan", "pink"),),
    ),
    "video": ("{}Which colours does the square have, in order?", (_FRAMES,)),
    "mixed": ("{}{}Which colours appear, in order?", (("orange", "black"), _MORE_FRAMES)),
}
"""A question, and its media: the colours of a square and of its background, or a list of frames with their seconds."""

_COLOURS = {
    "red": (222, 32, 30), "green": (28, 150, 48), "blue": (36, 66, 220), "yellow": (242, 224, 40), "pink": (246, 150, 196),
    "orange": (246, 138, 18), "cyan": (48, 214, 224), "black": (14, 14, 14), "white": (243, 243, 243),
}  # fmt: skip


def square(colour: str, background: str, side: int = 200) -> np.ndarray:
    """A square of ``colour`` in the middle of ``background``, ``[side, side, 3]``."""
    pixels = np.full((side, side, 3), _COLOURS[background], np.uint8)
    pixels[side // 4 : -side // 4, side // 4 : -side // 4] = _COLOURS[colour]
    return pixels


def prompts() -> list[list[int]]:
    """One prompt of each length, of ordinary tokens."""
    random = np.random.RandomState(7)
    first = len(CONTROL_TOKENS)
    return [[2, *random.randint(first, VOCABULARY, length - 1).tolist()] for length in PROMPT_LENGTHS]


def tokenizer() -> dict[str, Any]:
    """A ``tokenizer.json`` of the publisher's kind, one token per character."""
    characters = ["\u2581", "\n", *map(chr, range(0x21, 0x7F))]
    added = [
        {"id": index, "content": name, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, name in enumerate(CONTROL_TOKENS)
    ]
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": {text: index for index, text in enumerate([*CONTROL_TOKENS, *characters])},
            "merges": [],
        },
    }


def text_config(model: str) -> dict[str, Any]:
    """The text config in the publisher's words."""
    layer_types = _TEXT[model]["layer_types"]
    return {**_COMMON, **_TEXT[model], "num_hidden_layers": len(layer_types), "model_type": "gemma4_text"}


def config(model: str, layout: str) -> dict[str, Any]:
    """``config.json`` of ``model`` in ``layout``."""
    text = text_config(model)
    if layout.startswith("transformers"):
        text = _with_per_layer_config(text)
    if layout == "older-names":
        text = _with_flat_rope(text)
        text["torch_dtype"] = text.pop("dtype")
        if text["enable_moe_block"]:
            text["expert_intermediate_size"] = text.pop("moe_intermediate_size")
    if layout.endswith("text"):
        return {**text, "architectures": ["Gemma4ForCausalLM"], "transformers_version": "5.24.0"}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "boi_token_id": 7,
        "dtype": "float32",
        "eoi_token_id": 8,
        "image_token_id": 9,
        "model_type": "gemma4",
        "text_config": text,
        "tie_word_embeddings": True,
        "transformers_version": "5.5.0",
        "video_token_id": 10,
        "vision_config": vision_config(model),
        "vision_soft_tokens_per_image": 70,
    }


def _with_per_layer_config(text: dict[str, Any]) -> dict[str, Any]:
    text = dict(text)
    override = {"head_dim": text.pop("global_head_dim")}
    kv_heads = text.pop("num_global_key_value_heads")
    if text["attention_k_eq_v"] and kv_heads is not None:
        override["num_key_value_heads"] = kv_heads
    full = [index for index, kind in enumerate(text["layer_types"]) if kind == _FULL]
    return {**text, "per_layer_config": {str(index): override for index in full}}


def _with_flat_rope(text: dict[str, Any]) -> dict[str, Any]:
    text = dict(text)
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope[_FULL]["rope_theta"]
    text["rope_local_base_freq"] = rope[_SLIDING]["rope_theta"]
    text["rope_scaling"] = {"type": "proportional", "partial_rotary_factor": 0.25}
    return text


def weights(model: str) -> dict[str, np.ndarray]:
    """The text model's tensors in float32, named as ``transformers`` names them, without a prefix."""
    text, random = text_config(model), np.random.RandomState(MODELS.index(model) + 11)
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    layers, per_layer = text["num_hidden_layers"], text["hidden_size_per_layer_input"]

    def matrix(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    def scale(size: int) -> np.ndarray:
        return (1 + 0.3 * random.standard_normal(size)).astype(np.float32)

    found = {"embed_tokens.weight": matrix(VOCABULARY, hidden), "norm.weight": scale(hidden) * np.float32(3)}
    if per_layer:
        found["embed_tokens_per_layer.weight"] = matrix(VOCABULARY, layers * per_layer)
        found["per_layer_model_projection.weight"] = matrix(layers * per_layer, hidden)
        found["per_layer_projection_norm.weight"] = scale(per_layer)
    for index, kind in enumerate(text["layer_types"]):
        full = kind == _FULL
        borrows = index >= layers - text["num_kv_shared_layers"]
        head_dim = text["global_head_dim"] if full else text["head_dim"]
        of_full = text["num_global_key_value_heads"] if text["attention_k_eq_v"] else None
        kv_heads = (of_full if full else None) or text["num_key_value_heads"]
        mlp = text["intermediate_size"] * (2 if text["use_double_wide_mlp"] and borrows else 1)
        layer = {
            "self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            "self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            "self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            "self_attn.q_norm.weight": scale(head_dim) * np.float32(0.4),
            "self_attn.k_norm.weight": scale(head_dim) * np.float32(0.4),
            "mlp.gate_proj.weight": matrix(mlp, hidden),
            "mlp.up_proj.weight": matrix(mlp, hidden),
            "mlp.down_proj.weight": matrix(hidden, mlp),
            "layer_scalar": scale(1),
        }
        if not (full and text["attention_k_eq_v"]):
            layer["self_attn.v_proj.weight"] = matrix(kv_heads * head_dim, hidden)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        if text["enable_moe_block"]:
            count, size = text["num_experts"], text["moe_intermediate_size"]
            layer["router.proj.weight"] = matrix(count, hidden)
            layer["router.scale"] = scale(hidden)
            layer["router.per_expert_scale"] = scale(count)
            layer["experts.gate_up_proj"] = matrix(count, 2 * size, hidden)
            layer["experts.down_proj"] = matrix(count, hidden, size)
            norms += ["post_feedforward_layernorm_1", "pre_feedforward_layernorm_2"]
            norms += ["post_feedforward_layernorm_2"]
        if per_layer:
            layer["per_layer_input_gate.weight"] = matrix(per_layer, hidden)
            layer["per_layer_projection.weight"] = matrix(hidden, per_layer)
            norms.append("post_per_layer_input_norm")
        layer |= {f"{norm}.weight": scale(hidden) for norm in norms}
        found |= {f"layers.{index}.{name}": array for name, array in layer.items()}
    return found


def vision_weights(model: str) -> dict[str, np.ndarray]:
    """The tensors of a small vision tower and its projection, with the names of ``transformers``."""
    random, settings = np.random.RandomState(5), vision_config(model)
    size, mlp, head_dim = settings["hidden_size"], settings["intermediate_size"], settings["head_dim"]

    def matrix(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)

    def scale(count: int) -> np.ndarray:
        return (1 + 0.3 * random.standard_normal(count)).astype(np.float32)

    linears = {f"self_attn.{name}_proj": matrix(size, size) for name in "qkvo"}
    linears |= {"mlp.gate_proj": matrix(mlp, size), "mlp.up_proj": matrix(mlp, size)}
    linears |= {"mlp.down_proj": matrix(size, mlp)}
    layer = {f"{name}.linear.weight": array for name, array in linears.items()}
    if settings["use_clipped_linears"]:
        bounds = {"input_min": -0.9, "input_max": 1.1, "output_min": -0.7, "output_max": 0.8}
        layer |= {
            f"{name}.{bound}": np.array(value, np.float32)
            for name in linears
            for bound, value in bounds.items()
        }
    layer |= {f"self_attn.{name}_norm.weight": scale(head_dim) * np.float32(0.6) for name in "qk"}
    for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        layer[f"{norm}_layernorm.weight"] = scale(size)
    tower = {
        "patch_embedder.input_proj.weight": matrix(size, 768),
        "patch_embedder.position_embedding_table": matrix(2, settings["position_embedding_size"], size),
        **{f"encoder.layers.0.{name}": array for name, array in layer.items()},
    }
    if settings["standardize"]:
        tower |= {"std_bias": matrix(size), "std_scale": scale(size)}
    return {
        **{f"vision_tower.{name}": array for name, array in tower.items()},
        "embed_vision.embedding_projection.weight": matrix(_COMMON["hidden_size"], size),
    }


def named_weights(model: str, layout: str) -> dict[str, np.ndarray]:
    """All tensors of ``model`` as the files of ``layout`` name them."""
    text = weights(model)
    if layout.startswith("mlx"):
        text = _as_mlx(model, text)
    if layout.endswith("text"):
        return {f"model.{name}": array for name, array in text.items()}
    if layout == "mlx":
        prefix, tower_prefix = "language_model.model.", ""
    else:
        prefix, tower_prefix = "model.language_model.", "model."
    return {
        **{f"{prefix}{name}": array for name, array in text.items()},
        **{f"{tower_prefix}{name}": array for name, array in vision_weights(model).items()},
    }


def _as_mlx(model: str, text: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts as three stacks; no K and V projections where a layer borrows."""
    settings = text_config(model)
    owners = settings["num_hidden_layers"] - settings["num_kv_shared_layers"]
    renamed = {}
    for name, array in text.items():
        parts = name.split(".")
        borrows = parts[0] == "layers" and int(parts[1]) >= owners
        if borrows and parts[2] == "self_attn" and parts[3] in ("k_proj", "v_proj", "k_norm"):
            continue
        if name.endswith("experts.gate_up_proj"):
            place = name.removesuffix("gate_up_proj") + "switch_glu."
            gate, up = np.split(array, 2, axis=1)
            renamed[f"{place}gate_proj.weight"] = np.ascontiguousarray(gate)
            renamed[f"{place}up_proj.weight"] = np.ascontiguousarray(up)
        elif name.endswith("experts.down_proj"):
            renamed[name.removesuffix("down_proj") + "switch_glu.down_proj.weight"] = array
        else:
            renamed[name] = array
    return renamed


def write(folder: Path, model: str, layout: str) -> Path:
    """Write config and weights; the text-only layout of transformers in two shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model, layout), indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 6, 21]}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "eos_token": "<eos>"}))
    tensors = named_weights(model, layout)
    if layout != "transformers-text":
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    weight_map = {}
    for number, shard in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in shard}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
