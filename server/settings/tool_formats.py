"""The names of the formats of tool calls (docs/tools.md)."""

from typing import Literal

ToolFormat = Literal[
    "auto",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "functools",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "harmony",
    "hermes",
    "kimi_k2",
    "lfm2",
    "lfm2_json",
    "llama3",
    "llama4_json",
    "llama4_pythonic",
    "minimax_m2",
    "mistral",
    "mistral_args",
    "phi4_mini",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
]
