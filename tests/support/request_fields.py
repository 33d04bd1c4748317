"""Lists every request field of OpenAI, Anthropic, vLLM, SGLang, llama.cpp and mycli, and how mycli handles it.

The fields of OpenAI and Anthropic are those of their Python clients; the others are from the request schemas of vLLM
0.33.0, SGLang's main branch and llama.cpp b11434.
"""

from collections.abc import Mapping
from typing import Any

SERVED, REFUSED, HARMLESS = "served", "refused by name", "cannot change the reply"
NAMED = "left out, and named in a header"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "parameters": SCHEMA}
GRAMMAR = 'root ::= "yes" | "no"'

# Field -> its handling, and a value that requests something.
FIELDS: Mapping[str, tuple[str, Any]] = {
    # OpenAI
    "audio": (REFUSED, {"voice": "alloy", "format": "wav"}),
    "frequency_penalty": (SERVED, 0.5),
    "function_call": (SERVED, "none"),
    "functions": (SERVED, [FUNCTION]),
    "logit_bias": (SERVED, {"5": 1}),
    "logprobs": (SERVED, True),
    "max_completion_tokens": (SERVED, 2),
    "max_tokens": (SERVED, 2),
    "messages": (SERVED, [{"role": "user", "content": "Hello"}]),
    "metadata": (HARMLESS, {"a": "b"}),
    "modalities": (REFUSED, ["text", "audio"]),
    "model": (SERVED, "pico"),
    "moderation": (REFUSED, {"model": "m"}),
    "n": (SERVED, 2),
    "parallel_tool_calls": (SERVED, False),
    "prediction": (HARMLESS, {"type": "content", "content": "x"}),
    "presence_penalty": (SERVED, 0.5),
    "prompt_cache_key": (HARMLESS, "a"),
    "prompt_cache_options": (HARMLESS, {"mode": "implicit"}),
    "prompt_cache_retention": (HARMLESS, "24h"),
    "reasoning_effort": (SERVED, "max"),
    "response_format": (SERVED, {"type": "json_object"}),
    "safety_identifier": (HARMLESS, "a"),
    "seed": (SERVED, 3),
    "service_tier": (HARMLESS, "flex"),
    "stop": (SERVED, ["x"]),
    "store": (HARMLESS, True),
    "stream": (SERVED, True),
    "stream_options": (SERVED, None),
    "temperature": (SERVED, 0.5),
    "tool_choice": (SERVED, "none"),
    "tools": (SERVED, [{"type": "function", "function": FUNCTION}]),
    "top_logprobs": (SERVED, None),
    "top_p": (SERVED, 0.9),
    "user": (HARMLESS, "me"),
    "verbosity": (NAMED, "low"),
    "web_search_options": (REFUSED, {"search_context_size": "low"}),
    "best_of": (REFUSED, 2),
    "echo": (SERVED, True),
    "prompt": (SERVED, "Hello"),
    "suffix": (REFUSED, "x"),
    "access_programs": (HARMLESS, {"cyber": "standard"}),
    "background": (REFUSED, True),
    "background_options": (REFUSED, {"a": 1}),
    "context_management": (REFUSED, [{"type": "compaction"}]),
    "client_metadata": (HARMLESS, {"a": "b"}),
    "conversation": (REFUSED, "conv_1"),
    "image": (REFUSED, {"context_compression": "enabled"}),
    "include": (SERVED, ["message.output_text.logprobs"]),
    "input": (SERVED, "Hello"),
    "instructions": (SERVED, "Be brief."),
    "max_output_tokens": (SERVED, 2),
    "max_tool_calls": (HARMLESS, 3),
    "previous_response_id": (REFUSED, "resp_1"),
    "reasoning": (SERVED, {"effort": "low", "summary": "auto"}),
    "text": (SERVED, {"format": {"type": "json_object"}}),
    "truncation": (HARMLESS, "auto"),
    # Anthropic
    "betas": (HARMLESS, ["a-2025-01-01"]),
    "billing_policy": (HARMLESS, "a"),
    "cache_control": (HARMLESS, {"type": "ephemeral"}),
    "compaction": (REFUSED, {"type": "auto"}),
    "container": (REFUSED, "container_1"),
    "diagnostics": (HARMLESS, {"a": 1}),
    "fallback_credit_token": (HARMLESS, "a"),
    "fallbacks": (REFUSED, [{"model": "other"}]),
    "inference_geo": (HARMLESS, "us"),
    "mcp_servers": (REFUSED, [{"type": "url", "url": "http://127.0.0.1:1", "name": "x"}]),
    "output_config": (SERVED, {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}),
    "output_format": (SERVED, {"type": "json_schema", "schema": SCHEMA}),
    "speed": (HARMLESS, "fast"),
    "stop_sequences": (SERVED, ["x"]),
    "system": (SERVED, "Be brief."),
    "thinking": (SERVED, {"type": "adaptive", "display": "omitted"}),
    "thread": (REFUSED, {"id": "t"}),
    "top_k": (SERVED, 5),
    "user_profile_id": (HARMLESS, "a"),
    "workspace_id": (HARMLESS, "a"),
    "personality": (REFUSED, "friendly"),
    # of embeddings, reranking and tokenization
    "dimensions": (SERVED, 16),
    "encoding_format": (SERVED, "base64"),
    "embed_dtype": (REFUSED, "float16"),
    "endianness": (REFUSED, "big"),
    "padding": (REFUSED, "max_length"),
    "use_activation": (REFUSED, False),
    "embd_normalize": (REFUSED, -1),
    "content": (REFUSED, "Hello"),
    "query": (SERVED, "Hello"),
    "top_n": (SERVED, 1),
    "return_documents": (SERVED, True),
    "instruction": (SERVED, "Find it."),
    "instruct": (SERVED, "Find it."),
    "max_tokens_per_doc": (REFUSED, 5),
    "max_tokens_per_query": (REFUSED, 5),
    "texts": (REFUSED, ["a"]),
    "tokens": (SERVED, [5]),
    "return_token_strs": (REFUSED, True),
    "add_special": (SERVED, True),
    "parse_special": (SERVED, False),
    "with_pieces": (REFUSED, True),
    # mycli
    "deadline": (SERVED, 60),
    "input_type": (SERVED, "query"),
    "prompt_name": (SERVED, "query"),
    # vLLM
    "enable_response_messages": (REFUSED, True),
    "mm_payload": (REFUSED, {"a": 1}),
    "previous_input_messages": (REFUSED, [{"role": "user"}]),
    "previous_response": (REFUSED, {"id": "resp_1"}),
    "return_weight_versions": (REFUSED, True),
    "add_generation_prompt": (REFUSED, False),
    "add_special_tokens": (SERVED, False),
    "allowed_token_ids": (REFUSED, [5]),
    "bad_words": (REFUSED, ["x"]),
    "cache_salt": (HARMLESS, "a"),
    "chat_template": (REFUSED, "{{ messages }}"),
    "chat_template_kwargs": (SERVED, {"enable_thinking": False}),
    "continue_final_message": (SERVED, False),
    "documents": (SERVED, [{"title": "a", "text": "b"}]),
    "ec_transfer_params": (REFUSED, {"a": 1}),
    "guided_choice": (SERVED, ["yes", "no"]),
    "guided_grammar": (SERVED, GRAMMAR),
    "guided_json": (SERVED, SCHEMA),
    "guided_regex": (SERVED, "a+"),
    "ignore_eos": (SERVED, True),
    "include_reasoning": (SERVED, False),
    "include_stop_str_in_output": (REFUSED, True),
    "kv_transfer_params": (REFUSED, {"a": 1}),
    "length_penalty": (HARMLESS, 2.0),
    "logprob_token_ids": (REFUSED, [5]),
    "media_io_kwargs": (REFUSED, {"image": {}}),
    "min_p": (SERVED, 0.1),
    "min_tokens": (REFUSED, 3),
    "mm_processor_kwargs": (HARMLESS, {"a": 1}),
    "priority": (HARMLESS, 1),
    "prompt_embeds": (REFUSED, "AAAA"),
    "prompt_logprobs": (REFUSED, 1),
    "repetition_detection": (REFUSED, {"max_pattern_size": 4}),
    "repetition_penalty": (SERVED, 1.1),
    "request_id": (HARMLESS, "a"),
    "return_mm_kwargs": (HARMLESS, False),
    "return_prompt_text": (REFUSED, True),
    "return_token_ids": (REFUSED, True),
    "return_token_offsets": (HARMLESS, True),
    "return_tokens_as_token_ids": (REFUSED, True),
    "routed_experts_prompt_start": (HARMLESS, 1),
    "session_id": (HARMLESS, "a"),
    "skip_special_tokens": (REFUSED, False),
    "spaces_between_special_tokens": (HARMLESS, False),
    "stop_token_ids": (SERVED, [7]),
    "stream_interval": (HARMLESS, 8),
    "structured_outputs": (SERVED, {"choice": ["yes", "no"]}),
    "thinking_token_budget": (SERVED, 5),
    "truncate_prompt_tokens": (REFUSED, 5),
    "truncation_side": (HARMLESS, "left"),
    "use_beam_search": (REFUSED, True),
    "vllm_xargs": (REFUSED, {"a": 1}),
    "watermarking": (REFUSED, True),
    # SGLang
    "bootstrap_host": (REFUSED, "127.0.0.1"),
    "bootstrap_port": (REFUSED, 1),
    "bootstrap_room": (REFUSED, 1),
    "custom_labels": (HARMLESS, {"a": "b"}),
    "custom_logit_processor": (REFUSED, "x"),
    "custom_params": (REFUSED, {"a": 1}),
    "data_parallel_rank": (HARMLESS, 1),
    "disagg_prefill_dp_rank": (HARMLESS, 1),
    "ebnf": (SERVED, GRAMMAR),
    "extra_key": (HARMLESS, "a"),
    "images_config": (REFUSED, {"a": 1}),
    "input_ids": (REFUSED, [5]),
    "json_schema": (SERVED, SCHEMA),
    "lora_path": (REFUSED, "x"),
    "max_dynamic_patch": (HARMLESS, 1),
    "min_dynamic_patch": (HARMLESS, 1),
    "ngram_corpus_id": (HARMLESS, "a"),
    "no_stop_trim": (REFUSED, True),
    "regex": (SERVED, "a+"),
    "return_cached_tokens_details": (REFUSED, True),
    "return_hidden_states": (REFUSED, True),
    "return_meta_info": (REFUSED, True),
    "return_prompt_token_ids": (REFUSED, True),
    "return_routed_experts": (REFUSED, True),
    "rid": (HARMLESS, "a"),
    "routed_dp_rank": (HARMLESS, 1),
    "routed_experts_start_len": (HARMLESS, 1),
    "separate_reasoning": (REFUSED, False),
    "session_params": (REFUSED, {"id": "a"}),
    "stop_regex": (REFUSED, "a+"),
    "stream_reasoning": (REFUSED, False),
    "task": (REFUSED, "query"),
    "use_audio_in_video": (REFUSED, True),
    # llama.cpp
    "adaptive_decay": (HARMLESS, 0.5),
    "adaptive_target": (REFUSED, 0.5),
    "backend_sampling": (HARMLESS, True),
    "cache_prompt": (HARMLESS, False),
    "chat_format": (HARMLESS, 1),
    "chat_parser": (REFUSED, "x"),
    "dry_allowed_length": (HARMLESS, 2),
    "dry_base": (HARMLESS, 1.5),
    "dry_multiplier": (REFUSED, 0.8),
    "dry_penalty_last_n": (HARMLESS, 64),
    "dry_sequence_breakers": (HARMLESS, ["x"]),
    "dynatemp_exponent": (HARMLESS, 2.0),
    "dynatemp_range": (REFUSED, 0.5),
    "generation_prompt": (REFUSED, "x"),
    "grammar": (SERVED, GRAMMAR),
    "grammar_lazy": (REFUSED, True),
    "grammar_triggers": (REFUSED, [{"type": 1, "value": "x"}]),
    "grammar_type": (REFUSED, "tool_calls"),
    "id_slot": (HARMLESS, 1),
    "lora": (REFUSED, [{"id": 0, "scale": 1.0}]),
    "min_keep": (REFUSED, 2),
    "mirostat": (REFUSED, 2),
    "mirostat_eta": (HARMLESS, 0.2),
    "mirostat_tau": (HARMLESS, 4.0),
    "n_cache_reuse": (HARMLESS, 8),
    "n_cmpl": (REFUSED, 2),
    "n_discard": (HARMLESS, 2),
    "n_indent": (REFUSED, 2),
    "n_keep": (REFUSED, 2),
    "n_predict": (SERVED, 2),
    "n_probs": (REFUSED, 2),
    "parse_tool_calls": (REFUSED, False),
    "penalize_nl": (HARMLESS, True),
    "post_sampling_probs": (REFUSED, True),
    "preserved_tokens": (HARMLESS, ["x"]),
    "reasoning_budget_end_tag": (HARMLESS, "</think>"),
    "reasoning_budget_end_tags": (HARMLESS, ["</think>"]),
    "reasoning_budget_message": (REFUSED, "enough"),
    "reasoning_budget_start_tag": (HARMLESS, "<think>"),
    "reasoning_budget_tokens": (SERVED, 5),
    "reasoning_control": (REFUSED, True),
    "reasoning_format": (REFUSED, "none"),
    "repeat_last_n": (HARMLESS, 64),
    "repeat_penalty": (REFUSED, 1.1),
    "response_fields": (REFUSED, ["content"]),
    "return_progress": (NAMED, True),
    "return_tokens": (REFUSED, True),
    "samplers": (REFUSED, ["top_k"]),
    "sse_ping_interval": (HARMLESS, 5),
    "t_max_predict_ms": (REFUSED, 100),
    "timings_per_token": (NAMED, True),
    "top_n_sigma": (REFUSED, 1.0),
    "typical_p": (REFUSED, 0.9),
    "verbose": (REFUSED, True),
    "xtc_probability": (REFUSED, 0.5),
    "xtc_threshold": (HARMLESS, 0.1),
}


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
# Fields with another meaning or format on a route: their handling and a value.
EXCEPTIONS: Mapping[tuple[str, str], tuple[str, Any]] = {
    (CHAT, "use_beam_search"): (SERVED, True),
    (TEXT, "use_beam_search"): (SERVED, True),
    (CHAT, "length_penalty"): (SERVED, 2.0),
    (TEXT, "length_penalty"): (SERVED, 2.0),
    (CHAT, "echo"): (REFUSED, True),
    (CHAT, "add_special_tokens"): (REFUSED, True),
    (TEXT, "logprobs"): (SERVED, 2),
    (TEXT, "thinking_token_budget"): (REFUSED, 5),
    (TEXT, "reasoning_budget_tokens"): (REFUSED, 5),
    (TEXT, "stream_options"): (SERVED, None),
    (RESPONSES, "max_tokens"): (REFUSED, 2),  # max_output_tokens in this interface
    (RESPONSES, "n_predict"): (REFUSED, 2),
    (RESPONSES, "prompt"): (REFUSED, {"id": "pmpt_1"}),
    (RESPONSES, "tools"): (SERVED, [{"type": "function", **FUNCTION}]),
    (RESPONSES, "top_logprobs"): (SERVED, 2),
    (RESPONSES, "metadata"): (SERVED, {"a": "b"}),
    (RESPONSES, "store"): (SERVED, True),
    (INPUT_TOKENS, "input"): (SERVED, [{"role": "user", "content": "Hello"}, {"role": "user", "content": "there"}]),
    (INPUT_TOKENS, "tools"): (SERVED, [{"type": "function", **FUNCTION}]),
    (COUNT_TOKENS, "tools"): (SERVED, [{"name": "f", "input_schema": SCHEMA}]),
    (COUNT_TOKENS, "tool_choice"): (SERVED, {"type": "none"}),
    (COUNT_TOKENS, "context_management"): (SERVED, {"edits": [{"type": "clear_thinking_20251015"}]}),
    (EMBEDDINGS, "add_generation_prompt"): (REFUSED, True),
    (EMBEDDINGS, "add_special_tokens"): (REFUSED, False),
    (EMBEDDINGS, "chat_template_kwargs"): (REFUSED, {"a": 1}),
    (EMBEDDINGS, "continue_final_message"): (REFUSED, True),
    (EMBEDDINGS, "messages"): (REFUSED, [{"role": "user", "content": "Hello"}]),
    (RERANK, "chat_template_kwargs"): (REFUSED, {"a": 1}),
    (RERANK, "documents"): (SERVED, ["a", "b"]),
    (TOKENIZE, "add_generation_prompt"): (SERVED, False),
    (MESSAGES, "tools"): (SERVED, [{"name": "f", "input_schema": SCHEMA}]),
    (MESSAGES, "tool_choice"): (SERVED, {"type": "none"}),
    (MESSAGES, "context_management"): (SERVED, {"edits": [{"type": "clear_thinking_20251015"}]}),
}
