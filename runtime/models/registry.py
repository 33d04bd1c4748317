"""Reads a config.json with the family file of its `model_type`: `families/<model_type>.py` is the registry."""

import importlib
import pkgutil

from mycli.runtime.models import families as family_modules
from mycli.runtime.models.config import ModelConfig
from mycli.runtime.utils.json_fields import Fields

# Known families that cannot run, so that the error names the missing feature: all other models of transformers that
# write text, and some that others publish.
_REASONS = {
    "encoder-decoder models are not implemented": (
        "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart pp_formulanet prophetnet t5 "
        "t5gemma t5gemma2 trocr udop whisper"
    ),
    "it is an encoder, not a decoder": (
        "bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta-prelayernorm "
        "roc_bert roformer xlm xlm-roberta-xl xmod"
    ),
    "its table of position embeddings is not implemented": ("biogpt cpmant ctrl gpt-sw3 openai-gpt opt xglm"),
    "its attention biases by distance (ALiBi) are not implemented": "bloom mpt",
    "its layout of queries, keys and values is not implemented": ("codegen dbrx gpt_neox_japanese gptj persimmon"),
    "its indexer attention, which selects keys for each query, is not implemented": (
        "axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm5_next glm5_next_text glm_moe_dsa hy_v4 "
        "minimax_m3_vl minimax_m3_vl_text mistral_large4 mistral_large4_text qwen4_exp qwen4_exp_text"
    ),
    "its recurrent layers are not implemented": "recurrent_gemma rwkv xlstm",
    "its lightning attention is not implemented": "minimax",
    "its attention over permuted or hashed positions is not implemented": "reformer xlnet",
    "its cross-attention to images is not implemented": "mllama",
    "models of images, speech or music are not implemented": (
        "aria blip blip-2 canary chameleon cohere_asr cohere_compass cosmos3_edge cosmos3_omni deepseek_ocr2 "
        "deepseek_vl_v2 dia emu3 evolla florence2 fuyu git granite_docling idefics instructblip instructblipvideo "
        "kosmos-2 kosmos-2.5 kyutai_speech_to_text molmo2 moonshine moonshine_streaming moshi moss_transcribe_diarize "
        "musicgen musicgen_melody nemo_speechlm paligemma phi3_v phi4_multimodal phi4mm pi0 pix2struct pop2piano "
        "pp_chart2table seamless_m4t seamless_m4t_v2 shieldgemma2 speech-encoder-decoder speech_to_text speecht5 "
        "unlimited_ocr vibevoice vision-encoder-decoder voxtral_realtime"
    ),
    "draft models that read the cache of another model are not implemented": (
        "gemma4_assistant gemma4_unified_assistant"
    ),
    "its blocks that several layers share, each with an adapter of its own, are not implemented": "zamba2",
    "its blocks that several layers share are not implemented": "zamba",
    "its layers of two attentions with a shortcut mixture of experts are not implemented": "longcat_flash",
    "its experts of attention heads are not implemented": "jetmoe",
    "its logits by relative position and convolutions inside layers are not implemented": (
        "inkling2 inkling2_text inkling_mm_model inkling_text"
    ),
    "its convolutions of queries and keys and router of several layers are not implemented": "zaya",
    "its stacks of layers that run several times are not implemented": "hrm_text iquestloopcoder nanbeige",
    "its clamped SiLU, with a limit for each layer, is not implemented": "step3p5 step3p7",
    "its queries, keys and values in one tensor are not implemented": "mimo_v2",
    "its gates of the residual stream are not implemented": "muse_spark muse_spark_text",
    "its layout is not read; its later copies, whose names end in -hf, have the type glm": "chatglm",
    "it writes by diffusion, which is not implemented": "diffusion_gemma diffusion_gemma_text",
    "its patches of bytes are not implemented": "blt",
    "its sums of the residual stream, scaled by depth, are not implemented": "beam",
    "no file declares this family yet": "aria_text axk1 cohere_compass_text modernbert-decoder",
}
REFUSED = {model_type: reason for reason, names in _REASONS.items() for model_type in names.split()}


def families() -> list[str]:
    """Return the `model_type` values that can be read."""
    return sorted(module.name for module in pkgutil.iter_modules(family_modules.__path__))


def parse_config(raw: Fields) -> ModelConfig:
    """Return the ModelConfig of a parsed config.json. Raises ModelError naming the field at fault."""
    model_type = raw.text("model_type")
    # Only names of files in `families` are imported: config.json may come from a stranger.
    if model_type not in families():
        if model_type in REFUSED:
            message = f"{model_type!r:.60} is not supported: {REFUSED[model_type]}"
            raise raw.fail("model_type", message, "run it with transformers or vLLM")
        raise raw.fail("model_type", f"{model_type!r:.60} is not supported", f"supported: {', '.join(families())}")
    module = importlib.import_module(f"mycli.runtime.models.families.{model_type}")
    config: ModelConfig = module.read(raw)
    return config
