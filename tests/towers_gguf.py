"""A folder's vision tower as llama.cpp's converter writes it: names by the gguf package's own map, keys by its writer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

MERGERS = {
    "Qwen2VL": "qwen2vl_merger", "Qwen2_5_VL": "qwen2.5vl_merger", "Qwen3VL": "qwen3vl_merger", "Qwen3_5": "qwen3vl_merger",
    "Gemma3": "gemma3", "Mistral3": "pixtral", "SmolVLM": "idefics3", "Lfm2Vl": "lfm2", "Glm4v": "glm4v", "Glm4vMoe": "glm4v",
    "Llava": "pixtral", "InternVL": "internvl", "GlmOcr": "glm4v", "PaddleOCRVL": "paddleocr", "LightOnOcr": "lightonocr",
    "Llama4": "llama4", "KimiVL": "kimivl", "Kimi_K25": "kimik25", "DotsOCR": "dots_ocr", "Janus": "janus_pro",
    "HunYuanVL": "hunyuanvl", "MiniCPMV4_6": "minicpmv4_6", "MiniCPMOcr": "minicpmv4_6", "Exaone4_5_": "exaone4_5",
}  # fmt: skip
CLIP = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
HALVES = [0.5] * 3, [0.5] * 3
OF_HALVES = "Llama4", "Kimi", "Janus", "MiniCPM", "Qwen3VL", "Qwen3_5", "Gemma3", "SmolVLM", "Lfm2Vl", "InternVL"
SEEING = "visual.", "vision_tower.", "vision_model.", "connector.", "multi_modal_projector.", "mlp_AR.", "vit.", "merger.", \
    "mm_projector.", "aligner."
MINICPM = {
    "vit_merger.layer_norm1": "v.vit_merger.ln1", "vit_merger.self_attn.q_proj": "v.vit_merger.attn_q",
    "vit_merger.self_attn.k_proj": "v.vit_merger.attn_k", "vit_merger.self_attn.v_proj": "v.vit_merger.attn_v",
    "vit_merger.self_attn.out_proj": "v.vit_merger.attn_out", "vit_merger.pre_norm": "v.vit_merger.ds_ln",
    "vit_merger.linear_1": "v.vit_merger.ds_ffn_up", "vit_merger.linear_2": "v.vit_merger.ds_ffn_down",
    "merger.mlp.0.pre_norm": "mm.input_norm", "merger.mlp.0.linear_1": "mm.up", "merger.mlp.0.linear_2": "mm.down",
}  # fmt: skip
"""As llama.cpp's own map has it, which is younger than the package's."""
Tensors = dict[str, np.ndarray]


def write_mmproj(
    folder: Path,
    path: Path,
    keys: dict[str, Any] | None = None,
    change: Callable[[Tensors], Any] = lambda tensors: None,
    types: Callable[[str, np.ndarray], str] = lambda name, numbers: "F32",
) -> Path:
    """keys: instead of those that the converter writes, None: none at all. change: of the tensors by their names in the file.
    types: what a tensor is stored as."""
    config = json.loads((folder / "config.json").read_text())
    name = config["architectures"][0].removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM")
    tensors = dict(_tensors(name, config, folder))
    change(tensors)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    for key, value in ({**_keys(name, config, folder), **(keys or {})}).items():
        _add(writer, key, value)
    for each, numbers in tensors.items():
        kind = gguf.GGMLQuantizationType[types(each, numbers)]
        writer.add_tensor(each, gguf.quants.quantize(numbers, kind) if kind else numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    by_type = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    by_type[type(value)](key, value)


def _keys(name: str, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    vision, text = config["vision_config"], {**config, **config.get("text_config", {})}
    for key in ("image_size", "patch_size"):
        vision[key] = vision[key][0] if isinstance(vision.get(key), list) else vision.get(key, 560)
    hidden, inner = vision["hidden_size"], vision.get("intermediate_size")
    if name == "Qwen2VL":  # as wrong as there
        hidden, inner = vision["embed_dim"], vision["hidden_size"]
    mean, std = HALVES if name.startswith(OF_HALVES) else CLIP
    depth = vision.get("depth", vision.get("num_hidden_layers"))
    side = vision.get("image_size", 560)
    if name.startswith("Qwen3"):
        side = int(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"]
    keys: dict[str, Any] = {
        "clip.has_vision_encoder": True, "clip.projector_type": MERGERS[name],
        "clip.vision.projection_dim": text["hidden_size"], "clip.vision.image_size": side,
        "clip.vision.patch_size": vision["patch_size"], "clip.vision.embedding_length": hidden,
        "clip.vision.feed_forward_length": inner, "clip.vision.block_count": depth,
        "clip.vision.attention.head_count": vision.get("num_heads", vision.get("num_attention_heads")),
        "clip.vision.image_mean": mean, "clip.vision.image_std": std,
        "clip.vision.attention.layer_norm_epsilon": text.get("rms_norm_eps", 1e-6),
    }  # fmt: skip
    match name:
        case "Llama4":
            keys |= {"clip.use_gelu": True, "clip.vision.attention.layer_norm_epsilon": vision["norm_eps"],
                     "clip.vision.projector.scale_factor": int(1 / vision["pixel_shuffle_ratio"])}  # fmt: skip
        case "KimiVL":
            keys |= {"clip.use_gelu": True, "clip.vision.attention.layer_norm_epsilon": 1e-5,
                     "clip.vision.image_size": 64 * 14, "clip.vision.projector.scale_factor": 2}  # fmt: skip
        case "Kimi_K25":
            patch = vision["patch_size"] ** 2
            keys |= {"clip.use_gelu": True, "clip.vision.attention.layer_norm_epsilon": config["projection_layer_norm_eps"],
                     "clip.vision.image_size": vision["pos_emb_height"] * vision["patch_size"],
                     "clip.vision.projector.scale_factor": vision["merge_kernel_size"][0],
                     "clip.vision.image_min_pixels": 8 * patch, "clip.vision.image_max_pixels": 16384 * patch}  # fmt: skip
        case "DotsOCR":
            images = json.loads((folder / "preprocessor_config.json").read_text())
            keys |= {"clip.use_silu": True, "clip.vision.attention.layer_norm_epsilon": vision["rms_norm_eps"],
                     "clip.vision.embedding_length": vision["embed_dim"], "clip.vision.image_size": 0,
                     "clip.vision.projector.scale_factor": vision["spatial_merge_size"],
                     "clip.vision.image_min_pixels": images["min_pixels"],
                     "clip.vision.image_max_pixels": images["max_pixels"]}  # fmt: skip
        case "Janus":
            keys |= {"clip.use_gelu": True, "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
                     "clip.vision.feed_forward_length": int(hidden * vision["mlp_ratio"])}  # fmt: skip
        case "Qwen2_5_VL" | "Exaone4_5_":
            every = vision["fullatt_block_indexes"][0] + 1
            keys |= {"clip.use_silu": True, "clip.vision.n_wa_pattern": every, "clip.vision.window_size": vision["window_size"]}
            if name == "Exaone4_5_":
                keys |= {"clip.vision.attention.head_count_kv": vision["num_key_value_heads"],
                         "clip.vision.attention.layer_norm_epsilon": 1e-6}  # fmt: skip
        case "Qwen3VL" | "Qwen3_5":
            deep = vision.get("deepstack_visual_indexes") if name == "Qwen3VL" else []
            keys |= {"clip.use_gelu": True, "clip.vision.spatial_merge_size": vision["spatial_merge_size"],
                     "clip.vision.is_deepstack_layers": [layer in deep for layer in range(depth)]}  # fmt: skip
        case "Gemma3":
            scale = side // vision["patch_size"] // int(config["mm_tokens_per_image"] ** 0.5)
            keys |= {"clip.use_gelu": True, "clip.vision.projector.scale_factor": scale,
                     "clip.vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6)}  # fmt: skip
        case "SmolVLM":
            images = json.loads(own.read_text()) if (own := folder / "preprocessor_config.json").exists() else {}
            keys |= {"clip.use_gelu": True, "clip.vision.projector.scale_factor": config["scale_factor"],
                     "clip.vision.preproc_image_size": images.get("size", {}).get("longest_edge", side),
                     "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"]}  # fmt: skip
        case "Lfm2Vl":
            keys |= {"clip.use_gelu": True, "clip.vision.projector.scale_factor": config["downsample_factor"],
                     "clip.vision.image_size": 256,
                     "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"]}  # fmt: skip
        case "InternVL":
            images = json.loads((folder / "preprocessor_config.json").read_text())
            keys |= {f"clip.use_{vision['hidden_act']}": True,
                     "clip.vision.projector.scale_factor": int(1 / config["downsample_ratio"]),
                     "clip.vision.preproc_min_tiles": images.get("min_patches"),
                     "clip.vision.preproc_max_tiles": images.get("max_patches"),
                     "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"]}  # fmt: skip
        case "MiniCPMV4_6" | "MiniCPMOcr":
            images = json.loads((folder / "preprocessor_config.json").read_text())
            merge = 2 if config["downsample_mode"] == "4x" else 4
            keys |= {"clip.use_gelu": True, "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
                     "clip.vision.image_size": images.get("scale_resolution", 448),
                     "clip.vision.projector.scale_factor": merge,
                     "clip.vision.wa_layer_indexes": [config["insert_layer_id"]] if merge == 4 else None}  # fmt: skip
        case "HunYuanVL":
            size = json.loads((folder / "preprocessor_config.json").read_text())["size"]
            keys |= {"clip.use_gelu": True, "clip.vision.attention.layer_norm_epsilon": vision["rms_norm_eps"],
                     "clip.vision.spatial_merge_size": vision["spatial_merge_size"],
                     "clip.vision.image_size": vision["max_image_size"],
                     "clip.vision.image_min_pixels": size["shortest_edge"],
                     "clip.vision.image_max_pixels": size["longest_edge"]}  # fmt: skip
        case "Glm4v" | "Glm4vMoe" | "GlmOcr":
            keys |= {"clip.use_silu": True, "clip.vision.attention.layer_norm_epsilon": vision["rms_norm_eps"]}
        case "PaddleOCRVL":
            size = json.loads((folder / "preprocessor_config.json").read_text())["size"]
            keys |= {"clip.use_gelu": True, "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
                     "clip.vision.image_min_pixels": size["shortest_edge"],
                     "clip.vision.image_max_pixels": size["longest_edge"],
                     "clip.vision.image_size": int(size["longest_edge"] ** 0.5)}  # fmt: skip
        case "Mistral3" | "LightOnOcr" | "Llava":
            keys |= {f"clip.use_{vision['hidden_act']}": True, "clip.vision.spatial_merge_size": config.get("spatial_merge_size"),
                     "clip.vision.attention.layer_norm_epsilon": 1e-5}  # fmt: skip
    return keys


def _tensors(name: str, config: dict[str, Any], folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    vision = config["vision_config"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    for theirs, numbers in load_file(folder / "model.safetensors").items():
        key = theirs.removeprefix("model.")
        key = key.replace("vision_encoder.", "vision_tower.").replace("vision_projection.", "multi_modal_projector.")
        if MERGERS[name] == "pixtral" and key.endswith("embed_tokens.weight") and (folder / "tokenizer.json").exists():
            words = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
            yield "v.token_embd.img_break", numbers[next(word["id"] for word in words if word["content"] == "[IMG_BREAK]")]
        if not key.startswith(SEEING) or ".head." in key:
            continue
        if (others := _newer(name, key, numbers, vision)) is not None:
            for own, own_numbers in others:
                known = names.get_name(own, (".weight", ".bias"))
                yield known or own, np.ascontiguousarray(own_numbers)
            continue
        if name == "Gemma3":
            key = key.replace("vision_tower.", "vision_tower.vision_model.").replace("projection_weight", "projection.weight")
            numbers = numbers + 1 if "soft_emb_norm" in key else numbers
        if name == "InternVL":  # names as its converter has them
            key = f"model.{key}" + (".weight" if "lambda_" in key or "position_emb" in key else "")
            for part, place in (("layer_norm", 0), ("linear_1", 1), ("linear_2", 3)):
                key = key.replace(f"model.multi_modal_projector.{part}", f"mlp1.{place}")
        if name == "SmolVLM":
            key = theirs
        if name.startswith("MiniCPM"):
            module, _, kind = key.rpartition(".")
            own = next((f"{to}.{kind}" for part, to in MINICPM.items() if module.endswith(part)), None)
            if own is not None:
                if "vit_merger" not in own or config["downsample_mode"] == "16x":
                    yield own, numbers
                continue
            key = key.replace("vision_tower.", "vision_tower.vision_model.")
        if "vit.embeddings.position" in key:
            numbers = numbers[1:]
        if name == "PaddleOCRVL":
            key = key.replace("visual.", "model.")
        if name == "Lfm2Vl":
            key = key.replace("vision_tower.", "vision_tower.vision_model.")
            if "patch_embedding.weight" in key:
                numbers = numbers.reshape(len(numbers), vision["patch_size"], vision["patch_size"], 3).transpose(0, 3, 1, 2)
        module, _, kind = key.rpartition(".")
        if "patch_embed.proj" in key and kind == "weight":
            yield "v.patch_embd.weight", np.ascontiguousarray(numbers[:, :, 0])
            yield "v.patch_embd.weight.1", np.ascontiguousarray(numbers[:, :, 1])
        elif key.startswith("visual.deepstack_merger_list."):
            number, part = module.split(".")[2:]
            tensor = {"norm": "V_DS_NORM", "linear_fc1": "V_DS_FC1", "linear_fc2": "V_DS_FC2"}[part]
            layer = vision["deepstack_visual_indexes"][int(number)]
            yield f"{_named(tensor, layer)}.{kind}", numbers
        elif key.startswith("visual.merger.") and name.startswith("Qwen3"):
            tensor, place = {"norm": ("V_POST_NORM", 0), "linear_fc1": ("V_MMPROJ", 0), "linear_fc2": ("V_MMPROJ", 2)}[
                module.split(".")[2]
            ]
            yield f"{_named(tensor, place)}.{kind}", numbers
        elif ".qkv" in key and name.startswith("Qwen2"):
            for part, rows in zip("qkv", np.split(numbers, 3), strict=True):
                yield names.get_name(key.replace("qkv", part), (".weight", ".bias")), rows
        else:
            if name in ("Mistral3", "LightOnOcr", "Llava") and ("q_proj" in key or "k_proj" in key):
                heads = vision["num_attention_heads"]
                numbers = numbers.reshape(heads, 2, -1, numbers.shape[1]).swapaxes(1, 2).reshape(numbers.shape)
            yield names.get_name(key, (".weight", ".bias")), np.ascontiguousarray(numbers)


def _newer(name: str, key: str, numbers: np.ndarray, vision: dict[str, Any]) -> list[tuple[str, np.ndarray]] | None:
    """What llama.cpp's converter makes of a tensor before its names are known; None: nothing of its own."""
    kind = key.rpartition(".")[2]
    if name == "Llama4":
        if "post_attention_layernorm" in key:  # which the package's map, younger than published files, has for a Gemma 4's
            return [(f"v.blk.{key.split('.')[3]}.ln2.{kind}", numbers)]
        if "positional_embedding_vlm" in key:
            return [(f"{key}.weight", numbers)]
        return [("mm.model.fc.weight" if "multi_modal_projector" in key else key, numbers)]
    if name in ("KimiVL", "Kimi_K25"):
        if "pos_emb.weight" in key and name == "KimiVL":
            return [(key, numbers.reshape(-1, numbers.shape[-1]))]
        if "wqkv" in key and name == "KimiVL":
            return [(key.replace("wqkv", f"w{part}"), rows) for part, rows in zip("qkv", np.split(numbers, 3), strict=True)]
        if "wqkv" in key:
            q, k, v = np.split(numbers, 3)
            heads = vision["num_attention_heads"]
            q, k = (each.reshape(heads, -1, 2, 2, *each.shape[1:]).swapaxes(1, 2).reshape(each.shape) for each in (q, k))
            return [(key, np.concatenate([q, k, v]))]
        for old, new in (("proj.0.", "proj.linear_1."), ("proj.2.", "proj.linear_2.")):
            key = key.replace(f"mm_projector.{old}", f"mm_projector.{new}")
        return [(key, numbers)]
    if name == "DotsOCR":
        if ".mlp.fc" in key:
            parts = {"fc1": "gate_proj", "fc2": "down_proj", "fc3": "up_proj"}
            old = key.split(".")[-2]
            return [(key.replace("vision_tower.blocks.", "visual.blocks.").replace(old, parts[old]), numbers)]
        return [(key, numbers)]
    if name == "Janus":
        module = key.rpartition(".")[0]
        known = {"aligner.fc1": "mm.0", "aligner.hidden_layers.0": "mm.1"}
        return [(f"{known[module]}.{kind}" if module in known else f"model.{key}", numbers)]
    return None


def _named(tensor: str, place: int) -> str:
    return str(gguf.TENSOR_NAMES[gguf.MODEL_TENSOR[tensor]].format(bid=place))
