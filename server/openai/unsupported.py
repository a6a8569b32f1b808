"""Fields of other servers and of OpenAI's API that this server does not have.

No field that changes an answer is ignored in silence: it is rejected by name, unless its value has no effect. docs/api.md lists
the table.
"""

from typing import Any

# These fields are rejected by name, unless they have one of these values, which have no effect.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "store": (None, False),
    # vLLM's
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "chat_template": (None,),
    "detokenize": (None, True),
    "documents": (None, []),
    "include_reasoning": (None, True),
    "logits_processors": (None, []),
    "prompt_logprobs": (None,),
    "return_tokens_as_token_ids": (None, False),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    # llama-server's
    "dry_multiplier": (None, 0),
    "dynatemp_range": (None, 0),
    "image_data": (None, []),
    "min_keep": (None, 0),
    "mirostat": (None, 0),
    "n_probs": (None, 0),
    "repeat_last_n": (None, -1),
    "t_max_predict_ms": (None, 0, -1),
    "tfs_z": (None, 1),
    "top_n_sigma": (None, -1),
    "typical_p": (None, 1),
    "xtc_probability": (None, 0),
}

# These are further fields of one endpoint, as above.
UNSUPPORTED_IN_CHATS: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, False),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
}
UNSUPPORTED_IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {"add_special_tokens": (None, True)}
