"""Request fields of other servers: those that would change a reply are refused by name, harmless ones are ignored.

A field in neither table and in no schema belongs to no interface known here: it is ignored, and the reply says so.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BaseModel

from mycli.runtime.server.http.api_error import ApiError


def _words(text: str) -> list[str]:
    return text.split()


_NOTHING: tuple[Any, ...] = (None, False, 0, "", (), {})  # values that ask for nothing

# Refused with any value that asks for something.
_REFUSED = _words("""
    audio moderation web_search_options suffix previous_response_id conversation prompt background_options image
    context_management functions function_call
    container mcp_servers compaction fallbacks thread
    min_tokens bad_words allowed_token_ids use_beam_search logits_processors prompt_logprobs prompt_embeds
    logprob_token_ids return_tokens_as_token_ids return_token_ids return_prompt_text truncate_prompt_tokens watermarking
    include_stop_str_in_output chat_template chat_template_kwargs messages kv_transfer_params ec_transfer_params
    vllm_xargs repetition_detection media_io_kwargs mm_payload return_weight_versions enable_response_messages
    previous_input_messages previous_response max_tokens max_completion_tokens n_predict
    add_generation_prompt continue_final_message return_token_strs max_tokens_per_query max_tokens_per_doc personality
    stop_regex no_stop_trim lora_path session_params return_hidden_states custom_logit_processor custom_params
    return_routed_experts return_prompt_token_ids return_meta_info return_cached_tokens_details input_ids images_config
    use_audio_in_video bootstrap_host bootstrap_port bootstrap_room task
    mirostat dry_multiplier xtc_probability dynatemp_range samplers min_keep n_probs post_sampling_probs
    return_tokens n_indent response_fields lora image_data grammar_lazy grammar_type
    grammar_triggers generation_prompt chat_parser verbose reasoning_control reasoning_budget_message
    input_prefix input_suffix input_extra content texts with_pieces
""")
# Of llama.cpp: ask for more figures, which a client can do without. Ignored where nothing serves them, and named if
# they are set.
_FIGURES = ("timings_per_token", "return_progress")
# Field -> the values that ask for nothing, where these are others.
UNSUPPORTED_FIELDS: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_REFUSED, _NOTHING),
    **dict.fromkeys(_words("typical_p typ_p repeat_penalty n_cmpl"), (None, 1)),
    **dict.fromkeys(_words("top_n_sigma n_keep adaptive_target t_max_predict_ms"), (None, 0, -1)),
    "thinking_token_budget": (None, -1),  # of completions, which have no reasoning
    "reasoning_budget_tokens": (None, -1),
    "thinking_budget_tokens": (None, -1),
    # On by default elsewhere, and always on here.
    **dict.fromkeys(_words("skip_special_tokens include_reasoning parse_tool_calls add_special_tokens"), (None, True)),
    "use_activation": (None, True),
    **dict.fromkeys(_words("separate_reasoning stream_reasoning"), (None, True)),
    "modalities": (None, (), ("text",)),
    "reasoning_format": (None, "auto", "deepseek"),
    "verbosity": (None, "medium"),
    "padding": (None, "do_not_pad"),
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "embd_normalize": (None, 2),  # the Euclidean norm
}
# Fields that cannot change a reply: labels, billing, storage, placement, speed, and settings of features that are
# refused as long as they are on.
HARMLESS_FIELDS = frozenset(
    _words("""
    user metadata store service_tier safety_identifier prediction access_programs prompt_cache_key prompt_cache_options
    prompt_cache_retention max_tool_calls truncation client_metadata
    cache_control inference_geo speed betas billing_policy diagnostics fallback_credit_token user_profile_id
    workspace_id anthropic_version anthropic_beta
    priority request_id session_id cache_salt length_penalty mm_processor_kwargs spaces_between_special_tokens
    truncation_side routed_experts_prompt_start return_token_offsets return_mm_kwargs stream_interval
    rid extra_key data_parallel_rank routed_dp_rank disagg_prefill_dp_rank routed_experts_start_len custom_labels
    ngram_corpus_id max_dynamic_patch min_dynamic_patch
    cache_prompt id_slot repeat_last_n penalize_nl mirostat_tau mirostat_eta dry_base dry_allowed_length
    dry_penalty_last_n dry_sequence_breakers xtc_threshold dynatemp_exponent adaptive_decay preserved_tokens n_discard
    chat_format n_cache_reuse backend_sampling sse_ping_interval reasoning_budget_start_tag reasoning_budget_end_tag
    reasoning_budget_end_tags
    """)
)
# The same inside messages, tools and options: ids, labels, caching, what the client was shown, and settings of the
# transport.
_HARMLESS_PARTS = frozenset(
    _words("""
    id status phase index annotations citations signature encrypted_content cache_control prompt_cache_breakpoint
    logprobs description summary generate_summary eager_input_streaming caller created_by server_name data media_type
    """)
)
# Tools of other types are left out and named as a whole.
_READ_TYPES = (None, "function", "custom", "namespace")
_UNREAD = object()
_PENALTIES = ("presence_penalty", "frequency_penalty")
_MOST_NAMES = 32  # enough for a log line
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether `value` is one of those that change nothing."""
    # True equals 1 and False equals 0 in Python, not in a request; 0 and 0.0 are the same number.
    value = tuple(value) if isinstance(value, list) else value
    return any(value == entry and isinstance(value, bool) == isinstance(entry, bool) for entry in neutral)


def check_fields(body: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Return the names of fields that no interface has. Raises ApiError for a field that would change the reply."""
    unknown = []
    # The window of llama.cpp's penalties, which count the whole reply here.
    windowed = any(body.get(penalty) for penalty in _PENALTIES) and "repeat_last_n" not in known
    if windowed and not asks_nothing(body.get("repeat_last_n"), (None, -1)):
        raise _refusal("repeat_last_n")
    for name, value in body.items():
        if name in known or name in HARMLESS_FIELDS or (name in _FIGURES and asks_nothing(value, _NOTHING)):
            continue
        neutral = UNSUPPORTED_FIELDS.get(name)
        if neutral is None:
            unknown.append(name if _NAME.fullmatch(name) else "unprintable")
        elif not asks_nothing(value, neutral):
            raise _refusal(name)
    return unknown[:_MOST_NAMES]


def unread_parts(body: BaseModel, values: Mapping[str, Any]) -> list[str]:
    """Return the paths, without indices, of fields inside the fields of a request that no part of it reads."""
    paths: dict[str, None] = {}
    for name, value in values.items():
        _note_unread(_attribute(body, name), value, name, paths)
    return list(paths)


def _attribute(part: BaseModel, name: str) -> Any:
    # A field whose name would hide a method has an underscore and an alias.
    fields = type(part).model_fields
    return getattr(part, name if name in fields else f"{name}_" if f"{name}_" in fields else "", _UNREAD)


def _note_unread(read: Any, value: Any, path: str, paths: dict[str, None]) -> None:
    if isinstance(read, list) and isinstance(value, list):
        for item, raw in zip(read, value, strict=False):
            _note_unread(item, raw, path, paths)
    if not isinstance(read, BaseModel) or not isinstance(value, dict):
        return
    if path.startswith("tools") and value.get("type") not in _READ_TYPES:
        return
    for name, raw in value.items():
        if len(paths) == _MOST_NAMES:
            return
        if (part := _attribute(read, name)) is not _UNREAD:
            _note_unread(part, raw, f"{path}.{name}", paths)
        elif name not in _HARMLESS_PARTS and not asks_nothing(raw, _NOTHING):
            paths[f"{path}.{name if _NAME.fullmatch(name) else 'unprintable'}"] = None


def _refusal(name: str) -> ApiError:
    # The tool runner of Anthropic's SDK sends `thread`, and repeats the request without one after this error code only.
    details = {"error_code": "thread_unsupported_request", "unsupported": [name]} if name == "thread" else None
    return ApiError(400, f"{name}: is not supported", "unsupported_parameter", param=name, details=details)
