"""A request as Codex sends it: tools of several types, hints, and a history of calls."""

from typing import Any

from tests.server.chat.tools.patch_grammar import PATCH, PATCH_GRAMMAR


def message(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


COMMAND = {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}}
SHELL = {"type": "object", "properties": COMMAND, "required": ["command"], "additionalProperties": False}
LARK = {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR}
SEARCH = {"type": "function", "name": "search", "parameters": {"type": "object"}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": SHELL},
    {"type": "function", "name": "update_plan", "description": "Updates the plan.", "strict": False, "parameters": {}},
    {"type": "custom", "name": "apply_patch", "description": "Edits files. This is a free-form tool.", "format": LARK},
    {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [SEARCH]},
    {"type": "web_search", "external_web_access": True},
    {"type": "image_generation", "output_format": "png"},
    {"type": "local_shell"},
]
THOUGHTS: dict[str, Any] = {
    "summary": [{"type": "summary_text", "text": "Looking."}],
    "content": [{"type": "reasoning_text", "text": "I look first."}],
}
INPUT: list[dict[str, Any]] = [
    message("developer", "<permissions>The sandbox is read-only.</permissions>"),
    message("user", "<environment_context><cwd>/repo</cwd></environment_context>"),
    message("user", "Fix a.py."),
    {"type": "reasoning", "id": "rs_1", **THOUGHTS, "encrypted_content": None},
    {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "shell", "arguments": '{"command": ["cat", "a.py"]}'},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "x = 1\n"}]},
    {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"},
    {"type": "custom_tool_call", "status": "completed", "call_id": "c2", "name": "apply_patch", "input": PATCH},
    {"type": "custom_tool_call_output", "call_id": "c2", "output": "Success."},
    {"type": "function_call", "call_id": "c3", "namespace": "mcp__docs", "name": "search", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c3", "output": "None."},
    message("developer", "Be quick."),
    message("user", "And now?"),
]
REQUEST: dict[str, Any] = {"instructions": "You are a coding agent.", "input": INPUT, "tools": TOOLS, "tool_choice": "auto"}
REQUEST |= {"parallel_tool_calls": True, "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True}
REQUEST |= {"include": ["reasoning.encrypted_content"], "service_tier": "auto", "prompt_cache_key": "0199-aaaa"}
REQUEST |= {"text": {"verbosity": "low"}, "client_metadata": {"session_id": "0199-aaaa", "turn": {"n": 1}}}
