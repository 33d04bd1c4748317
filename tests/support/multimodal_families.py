"""Builds small random multimodal models with transformers, of which only the text part is read."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.families import enliven
from tests.support.family_parts import GEMMA4, IDS, MULTIPLIERS, SMALL, ministral_rope
from tests.support.latent_families import SIZES
from tests.support.recurrent_families import DELTA, DELTA_EXPERTS, RECURRENT

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP = {**VISION, "image_size": 16, "patch_size": 8}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 64,
    "num_position_embeddings": 4,
}
CLIP = {"model_type": "clip_vision_model", **SIGLIP, "projection_dim": 16}
SIGLIP_VISION = {"model_type": "siglip_vision_model", **SIGLIP}
PIXTRAL = {"model_type": "pixtral", **SIGLIP, "head_dim": 8}
INTERN_VISION = {"model_type": "internvl_vision", **VISION, "image_size": [16, 16], "patch_size": [8, 8]}
QWEN2_VISION = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "intermediate_size": 16}
GLM_VISION = {**QWEN_VISION, "image_size": 16, "out_hidden_size": 64}
OCR_VISION = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64, "patch_size": 16, "mlp_dim": 16}
PERCEIVER = {"hidden_size": 64, "resampler_n_latents": 2, "resampler_depth": 1}
OVIS_VISION = {**SIGLIP, "vocab_size": 16}
JANUS_VQ = {
    "embed_dim": 8,
    "num_embeddings": 16,
    "base_channels": 32,
    "projection_dim": 16,
    "image_token_embed_dim": 64,
}
AUDIO = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16, "output_dim": 64}
FUN_ASR = {
    "audio_config": {**VISION},
    "adaptor_config": {"hidden_size": 64, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
}
GRANITE_SPEECH = {
    "encoder_config": {"num_layers": 1, "hidden_dim": 16, "num_heads": 2, "dim_head": 8, "context_size": 4},
    "projector_config": {**VISION, "encoder_hidden_size": 16},
}
VIBEVOICE = {
    "acoustic_tokenizer_encoder_config": {"hidden_size": 16, "num_filters": 4},
    "semantic_tokenizer_encoder_config": {"hidden_size": 16, "num_filters": 4},
}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [3, 3, 2]}}
GLM_ROPE = {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}}
HUNYUAN_ROPE = {
    "rope_type": "xdrope",
    "alpha": 1000.0,
    "factor": 1.0,
    "rope_theta": 1e4,
    "xdrope_section": [2, 2, 2, 2],
}
LLAVAS = {"llava": "llama", "llava_next": "llama", "llava_next_video": "llama", "llava_onevision": "qwen2"}
LLAVAS |= {"vipllava": "llama", "video_llava": "llama"}
# id -> (outer type, text type, differences of the text config from SMALL, vision, other fields of the outer config)
FOLDERS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {**IDS, "head_dim": 16, "sliding_window": 7},
        {"model_type": "siglip_vision_model", **SIGLIP},
        {"mm_tokens_per_image": 4},
    ),
    "mistral3": (
        "mistral3",
        "mistral",
        {**IDS, "head_dim": 16, "sliding_window": None},
        {"model_type": "pixtral", **SIGLIP, "head_dim": 8},
        {"tie_word_embeddings": False},
    ),
    "mistral3-ministral3": (
        "mistral3",
        "ministral3",
        {**IDS, "head_dim": 16, **ministral_rope(original=16)},
        {"model_type": "pixtral", **SIGLIP, "head_dim": 8},
        {"tie_word_embeddings": True},
    ),
    "gemma4": (
        "gemma4",
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 1}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        {"model_type": "gemma4_vision", **VISION, "num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 1},
        {"audio_config": None},
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        {**DELTA_EXPERTS, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        {"model_type": "qwen3_5_moe", **QWEN_VISION},
        {"tie_word_embeddings": False},
    ),
    "nemotron_h_omni": (
        "nemotron_h_omni",
        "nemotron_h",
        RECURRENT["nemotron_h-every-kind"][1],
        {"model_type": "radio", **SIGLIP, "patch_size": 16, "max_img_size": 64, "video_temporal_patch_size": 2},
        {"audio_config": None, "projector_hidden_size": 16, "vision_hidden_size": 16},
    ),
    "qwen2_5_omni_thinker": (
        "qwen2_5_omni_thinker",
        "qwen2_5_omni_text",
        {**IDS, **MROPE},
        {"model_type": "qwen2_5_omni_vision_encoder", **QWEN_VISION},
        {"audio_config": AUDIO},
    ),
    "qwen3_omni_moe_thinker": (
        "qwen3_omni_moe_thinker",
        "qwen3_omni_moe_text",
        {**IDS, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, **MROPE},
        {"model_type": "qwen3_omni_moe_vision_encoder", **QWEN_VISION, "deepstack_visual_indexes": [0]},
        {"audio_config": AUDIO},
    ),
    **{name: (name, f"{name}_text", {**IDS, **MROPE}, QWEN2_VISION, {}) for name in ("qwen2_vl", "qwen2_5_vl")},
    "qwen3_vl": (
        "qwen3_vl",
        "qwen3_vl_text",
        {**IDS, "head_dim": 16, **MROPE},
        {"model_type": "qwen3_vl", **QWEN_VISION, "deepstack_visual_indexes": [0]},
        {"tie_word_embeddings": True},
    ),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        {**IDS, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, **MROPE},
        {"model_type": "qwen3_vl_moe", **QWEN_VISION, "deepstack_visual_indexes": [0]},
        {},
    ),
    "muse_glimmer": (
        "muse_glimmer",
        "muse_glimmer_text",
        {**IDS, "head_dim": 16, "sliding_window": 7},
        {**VISION, "pos_emb_height": 2, "pos_emb_width": 2, "max_position_embeddings": 4},
        {"out_hidden_size": 64, "projector_hidden_size": 16},
    ),
    "glm46v": (
        "glm46v",
        "glm4v_text",
        {**IDS, "head_dim": 16, **GLM_ROPE},
        {"model_type": "glm4v_vision", **GLM_VISION},
        {},
    ),
    "glm4v_moe": (
        "glm4v_moe",
        "glm4v_moe_text",
        {
            **IDS,
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            **GLM_ROPE,
        },
        {"model_type": "glm4v_moe_vision", **GLM_VISION},
        {},
    ),
    "exaone4_5": (
        "exaone4_5",
        "exaone4",
        {**IDS, "sliding_window": 7},
        {**QWEN2_VISION, "num_key_value_heads": 2, "out_hidden_size": 64},
        {},
    ),
    "ernie4_5_vl_moe": (
        "ernie4_5_vl_moe",
        "ernie4_5_vl_moe_text",
        {
            **{**IDS, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [24, 16]},
            **{"mlp_layer_types": ["sparse", "dense", "sparse"], **MROPE},
        },
        {**VISION, "depth": 1, "num_heads": 2, "patch_size": 8},
        {},
    ),
    "lfm3_vl": (
        "lfm3_vl",
        "lfm3",
        {**IDS, "num_hidden_layers": 5, "head_dim": 16, "sliding_window": 7},
        {**VISION, "num_key_value_heads": 2},
        {},
    ),
    "minicpmv4_6": (
        "minicpmv4_6",
        "qwen3_5_text",
        {**IDS, **DELTA, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        {**SIGLIP},
        {},
    ),
    "minicpmv4_7": (
        "minicpmv4_7",
        "qwen3_5_text",
        {**IDS, **DELTA, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        {**SIGLIP},
        {},
    ),
    "kimi_k25": (
        "kimi_k25",
        "deepseek_v3",
        {
            **IDS,
            **SIZES,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "n_group": 2,
            "topk_group": 1,
        },
        {**VISION},
        {"tie_word_embeddings": False},
    ),
    "glm4v": ("glm4v", "glm4v_text", {**IDS, "head_dim": 16, **GLM_ROPE}, {"model_type": "glm4v", **GLM_VISION}, {}),
    **{name: (name, text, {**IDS}, CLIP, {}) for name, text in LLAVAS.items()},
    "llava-pixtral": ("llava", "mistral", {**IDS, "head_dim": 16}, PIXTRAL, {"vision_feature_layer": -1}),
    "internvl": ("internvl", "qwen2", {**IDS}, INTERN_VISION, {"tie_word_embeddings": False}),
    "aya_vision": ("aya_vision", "cohere2", {**IDS, "sliding_window": 7}, SIGLIP_VISION, {}),
    "cohere2_vision": ("cohere2_vision", "cohere2", {**IDS, "sliding_window": 7}, SIGLIP_VISION, {}),
    "idefics3": ("idefics3", "llama", {**IDS}, {"model_type": "idefics3_vision", **SIGLIP}, {"scale_factor": 1}),
    "idefics2": ("idefics2", "mistral", {**IDS, "sliding_window": None}, SIGLIP, {"perceiver_config": PERCEIVER}),
    "lighton_ocr": ("lighton_ocr", "qwen3", {**IDS, "head_dim": 16}, PIXTRAL, {}),
    "video_llama_3": ("video_llama_3", "qwen2", {**IDS}, SIGLIP, {}),
    "smolvlm": ("smolvlm", "llama", {**IDS}, {"model_type": "smolvlm_vision", **SIGLIP}, {"scale_factor": 1}),
    "lfm2_vl": ("lfm2_vl", "lfm2", {**IDS, "layer_types": ["conv", "full_attention", "conv"]}, SIGLIP_VISION, {}),
    "deepseek_vl": ("deepseek_vl", "llama", {**IDS}, SIGLIP_VISION, {}),
    "janus": (
        "janus",
        "llama",
        {**IDS},
        {**SIGLIP, "num_image_tokens": 4, "projection_dim": 16},
        {"vq_config": JANUS_VQ},
    ),
    "ovis2": ("ovis2", "qwen2", {**IDS}, OVIS_VISION, {"hidden_size": 64, "vocab_size": 97}),
    "fast_vlm": ("fast_vlm", "qwen2", {**IDS}, CLIP, {}),
    "got_ocr2": ("got_ocr2", "qwen2", {**IDS}, {"hidden_size": 16, "output_channels": 16, **OCR_VISION}, {}),
    "deepseek_vl_hybrid": (
        "deepseek_vl_hybrid",
        "llama",
        {**IDS},
        SIGLIP_VISION,
        {"high_res_vision_config": {"hidden_size": 16, "output_channels": 16, **OCR_VISION}},
    ),
    "glm_ocr": (
        "glm_ocr",
        "glm_ocr_text",
        {**IDS, "head_dim": 24, "rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 4, 4]}},
        GLM_VISION,
        {},
    ),
    "glmga": (
        "glmga",
        "glm4v_text",
        {**IDS, "head_dim": 16, **GLM_ROPE},
        {"model_type": "glm4v_vision", **GLM_VISION},
        {},
    ),
    "paddleocr_vl": ("paddleocr_vl", "paddleocr_vl_text", {**IDS, "head_dim": 16, **MROPE}, SIGLIP, {}),
    "hunyuan_vl": (
        "hunyuan_vl",
        "hunyuan_vl_text",
        {**IDS, "head_dim": 16, "rope_parameters": HUNYUAN_ROPE},
        {**VISION, "out_hidden_size": 64, "patch_size": 8, "max_image_size": 16, "min_image_size": 8},
        {},
    ),
    "hyperclovax_vision_v2": (
        "hyperclovax_vision_v2",
        "hyperclovax",
        {**IDS, "head_dim": 16, **MULTIPLIERS, "logits_scaling": 0.125},
        {**QWEN_VISION, "out_hidden_size": 64},
        {},
    ),
    "granite4_vision": (
        "granite4_vision",
        "granite4_vision_text",
        {**IDS, **MULTIPLIERS},
        {**CLIP, "hidden_size": 64},
        {"downsample_rate": "1/2", "deepstack_layer_map": [[0, 1]]},
    ),
    "qianfan_ocr": ("qianfan_ocr", "qwen3", {**IDS, "head_dim": 16}, {**VISION, "image_size": 16, "patch_size": 8}, {}),
    "minicpm_ocr": (
        "minicpm_ocr",
        "qwen3_5_text",
        {**IDS, **DELTA, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        {**SIGLIP},
        {"insert_layer_id": 0},
    ),
    "qwen3_asr": (
        "qwen3_asr",
        "qwen3",
        {**IDS, "head_dim": 16},
        {},
        {**IDS, "audio_config": {**AUDIO, "downsample_hidden_size": 8, "num_mel_bins": 16}},
    ),
    "glmasr": ("glmasr", "llama", {**IDS}, {}, {"audio_config": {**VISION, "num_mel_bins": 8}}),
    "fun_asr_nano": ("fun_asr_nano", "qwen3", {**IDS, "head_dim": 16}, {}, FUN_ASR),
    **{
        name: (name, "granite", {**IDS, **MULTIPLIERS}, {}, GRANITE_SPEECH)
        for name in ("granite_speech", "granite_speech_plus")
    },
    "vibevoice_asr": ("vibevoice_asr", "qwen2", {**IDS}, {}, VIBEVOICE),
}
# What transformers' class leaves out, with the same greedy tokens: multiplies its logits.
LOGIT_SCALES = {
    **dict.fromkeys(("aya_vision", "cohere2_vision"), 0.0625),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), 1 / MULTIPLIERS["logits_scaling"]),
}


def make_folder(folder: Path, name: str, **changes: Any) -> transformers.PreTrainedModel:
    outer, inner, text, vision, others = FOLDERS[name]
    torch.manual_seed(0)
    sections = {
        "text_config": {"model_type": inner, **SMALL, "intermediate_size": 96, **text, **changes},
        "vision_config": vision,
    }
    config = transformers.AutoConfig.for_model(outer, **sections, **others)
    classes = transformers.AutoModelForImageTextToText, transformers.AutoModelForMultimodalLM
    auto = next(each for each in classes if type(config) in each._model_mapping)
    model = auto.from_config(config, attn_implementation="eager").float().eval()
    enliven(model)
    model.save_pretrained(folder)
    if outer in ("kimi_k25", "qianfan_ocr"):
        _publish_whole(model, folder / "model.safetensors")
    if outer == "qwen3_vl_moe":
        _publish_experts(folder / "model.safetensors")
    return model


def _publish_whole(model: transformers.PreTrainedModel, path: Path) -> None:
    # transformers 5.23 renames every `layers` as it saves, not only those of images, which it does not read back.
    names = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for prefix, published in names.items():
        tensors = {name.replace(prefix, published, 1): tensor for name, tensor in tensors.items()}
    save_file(tensors, path)


def _publish_experts(path: Path) -> None:
    # Published files stack the transposed weights; transformers transposes them on load.
    tensors = load_file(path)
    stacks = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
    save_file({**tensors, **stacks}, path)
