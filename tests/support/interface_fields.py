"""The request fields of each interface by route, from the schemas of vLLM 0.33.0, SGLang and llama.cpp b11434."""

from collections.abc import Mapping


def _words(text: str) -> list[str]:
    return text.split()


_TEXT = """
    echo frequency_penalty ignore_eos logit_bias max_tokens min_p min_tokens model n presence_penalty
    repetition_penalty seed stop stop_token_ids stream stream_options temperature top_k top_p user
"""


_VLLM = f"""
    {_TEXT} add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params guided_choice
    guided_grammar guided_json guided_regex include_stop_str_in_output kv_transfer_params length_penalty
    logprob_token_ids logprobs mm_payload priority prompt_logprobs repetition_detection request_id response_format
    return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids return_weight_versions
    routed_experts_prompt_start session_id skip_special_tokens spaces_between_special_tokens stream_interval
    structured_outputs thinking_token_budget truncate_prompt_tokens truncation_side use_beam_search vllm_xargs
    watermarking
"""


_SGLANG = f"""
    {_TEXT} logprobs bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor
    custom_params data_parallel_rank disagg_prefill_dp_rank ebnf extra_key images_config json_schema lora_path
    ngram_corpus_id no_stop_trim priority regex response_format return_cached_tokens_details return_hidden_states
    return_routed_experts return_token_ids rid routed_dp_rank routed_experts_start_len session_id session_params
    skip_special_tokens stop_regex
"""


_LLAMA = """
    adaptive_decay adaptive_target backend_sampling cache_prompt chat_format chat_parser dry_allowed_length dry_base
    dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp_exponent dynatemp_range frequency_penalty
    generation_prompt grammar grammar_lazy grammar_triggers grammar_type id_slot ignore_eos json_schema logit_bias
    lora max_tokens min_keep min_p mirostat mirostat_eta mirostat_tau n_cache_reuse n_cmpl n_discard n_indent n_keep
    n_predict n_probs parse_tool_calls penalize_nl post_sampling_probs presence_penalty preserved_tokens
    reasoning_budget_end_tag reasoning_budget_end_tags reasoning_budget_message reasoning_budget_start_tag
    reasoning_budget_tokens reasoning_control reasoning_format repeat_last_n repeat_penalty response_fields
    return_progress return_tokens samplers seed sse_ping_interval stop stream stream_options t_max_predict_ms
    temperature timings_per_token top_k top_n_sigma top_p typical_p verbose xtc_probability xtc_threshold
"""


NATIVE = "/completion"
CHAT, TEXT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


INPUT_TOKENS, COUNT_TOKENS = "/v1/responses/input_tokens", "/v1/messages/count_tokens"


EMBEDDINGS, RERANK, TOKENIZE, DETOKENIZE = "/v1/embeddings", "/v1/rerank", "/tokenize", "/detokenize"


_POOLING = """
    cache_salt mm_processor_kwargs model padding priority request_id truncate_prompt_tokens truncation_side
    use_activation user
"""


# Interface -> route -> its fields in addition to those of OpenAI's and Anthropic's clients.
INTERFACES: Mapping[str, Mapping[str, list[str]]] = {
    "vllm": {
        CHAT: _words(f"""
            {_VLLM} add_generation_prompt chat_template chat_template_kwargs continue_final_message documents
            include_reasoning logprobs max_completion_tokens media_io_kwargs messages mm_processor_kwargs
            parallel_tool_calls reasoning_effort return_prompt_text tool_choice tools top_logprobs
        """),
        TEXT: _words(f"{_VLLM} prompt prompt_embeds suffix"),
        RESPONSES: _words("""
            background cache_salt chat_template_kwargs ec_transfer_params enable_response_messages frequency_penalty
            ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params logit_bias media_io_kwargs
            min_p mm_payload mm_processor_kwargs presence_penalty previous_input_messages previous_response priority
            repetition_penalty request_id return_mm_kwargs seed session_id skip_special_tokens
            spaces_between_special_tokens stop stop_token_ids structured_outputs top_k vllm_xargs watermarking
        """),
        MESSAGES: _words("""
            cache_salt chat_template_kwargs ec_transfer_params kv_transfer_params mm_payload return_mm_kwargs
            vllm_xargs watermarking
        """),
        COUNT_TOKENS: ["chat_template_kwargs"],
        EMBEDDINGS: _words(f"""
            {_POOLING} add_generation_prompt add_special_tokens chat_template chat_template_kwargs
            continue_final_message dimensions embed_dtype encoding_format endianness input media_io_kwargs
            messages
        """),
        RERANK: _words(f"""
            {_POOLING} chat_template_kwargs documents instruction max_tokens_per_doc max_tokens_per_query query top_n
        """),
        TOKENIZE: _words("""
            add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message
            media_io_kwargs mm_processor_kwargs model return_token_strs tools
        """),
        DETOKENIZE: ["model", "tokens"],
    },
    "sglang": {
        CHAT: _words(f"""
            {_SGLANG} chat_template_kwargs continue_final_message input_ids logprobs max_completion_tokens
            max_dynamic_patch messages min_dynamic_patch parallel_tool_calls reasoning_effort return_meta_info
            return_prompt_token_ids separate_reasoning stream_reasoning task tool_choice tools top_logprobs
            use_audio_in_video
        """),
        TEXT: _words(f"{_SGLANG} best_of prompt suffix"),
        RESPONSES: _words("""
            background cache_salt extra_key frequency_penalty min_p presence_penalty priority repetition_penalty
            request_id stop top_k
        """),
        EMBEDDINGS: _words("dimensions encoding_format input lora_path model priority rid user"),
        RERANK: _words("documents instruct query return_documents top_n"),
        TOKENIZE: ["add_special_tokens", "model"],
        DETOKENIZE: ["model", "skip_special_tokens", "tokens"],
    },
    "llama.cpp": {
        CHAT: _words(f"{_LLAMA} chat_template_kwargs continue_final_message messages tool_choice tools"),
        TEXT: _words(f"{_LLAMA} prompt"),
        NATIVE: _words(f"{_LLAMA} prompt"),
        RESPONSES: _words(f"{_LLAMA} chat_template_kwargs"),
        MESSAGES: ["chat_template_kwargs"],
        EMBEDDINGS: _words("content dimensions embd_normalize encoding_format input model"),
        RERANK: _words("documents query texts top_n"),
        TOKENIZE: ["add_special", "parse_special", "with_pieces"],
        DETOKENIZE: ["tokens"],
    },
    "mycli": {  # its own, and those of other servers on further routes
        CHAT: ["deadline"],
        TEXT: ["deadline"],
        RESPONSES: ["chat_template_kwargs", "deadline", "thinking_token_budget"],
        MESSAGES: ["chat_template_kwargs", "deadline"],
        EMBEDDINGS: ["prompt_name", "input_type"],  # of sentence-transformers and Cohere
    },
}
