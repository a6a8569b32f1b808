"""Small chat templates, each with one restriction that published templates have."""

TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
CALL = "<tool_call>{{ call.function | tojson }}</tool_call>"
CALLS = "{% for call in m.tool_calls or [] %}" + CALL + "{% endfor %}"
LOOP = "{% for m in messages %}"
TURN = "<{{ m.role }}{{ ' ' ~ m.name if m.name }}>{{ m.reasoning_content }}{{ m.content }}" + CALLS + "\n"
END = "{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
FULL = TOOLS + LOOP + TURN + END


def refusing(condition: str, template: str = FULL) -> str:
    """The template, which raises for messages that fulfil the condition."""
    return template.replace(LOOP, LOOP + "{% if " + condition + " %}{{ raise_exception('refused') }}{% endif %}", 1)


ALTERNATING = (
    "{% set ns = namespace(user=true) %}{% for m in messages if m.role in ('user', 'assistant') and not m.tool_calls %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endfor %}" + FULL
)
NO_CALLS = {"calls", "several_calls", "text_with_calls", "reasoning_with_text"}
# Templates by the abilities that they lack.
RESTRICTED: dict[str, tuple[str, set[str]]] = {
    "full": (FULL, set()),
    "parts": (
        FULL.replace("{{ m.content }}", "{% for p in m.content if p is mapping %}{{ p.text }}{% endfor %}"),
        {"parts_only"},
    ),
    "no system": (refusing("m.role == 'system'"), {"system", "system_anywhere"}),
    "system dropped": (FULL.replace(TURN, "{% if m.role != 'system' %}" + TURN + "{% endif %}"), {"system", "system_anywhere"}),
    "system first": (refusing("m.role == 'system' and not loop.first"), {"system_anywhere"}),
    "system hoisted": (
        TOOLS
        + "{% for m in messages if m.role == 'system' %}<system>{{ m.content }}{% endfor %}"
        + LOOP.replace("messages", "messages if m.role != 'system'")
        + TURN
        + END,
        {"system_anywhere"},
    ),
    "system beside a user": ("{% if 'user' in messages | map(attribute='role') %}" + FULL + "{% endif %}", {"system_alone"}),
    "no tools": (FULL.replace(TOOLS, ""), {"tools"}),
    "tools raise": (TOOLS.replace("tool | tojson", "tool.missing.more") + FULL, {"tools"}),
    "no calls": (FULL.replace(CALLS, ""), NO_CALLS),
    "one call": (refusing("m.tool_calls and m.tool_calls | length > 1"), {"several_calls"}),
    "first call": (FULL.replace(CALLS, CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")), {"several_calls"}),
    "calls or text": (FULL.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"), {"text_with_calls"}),
    "reasoning or text": (refusing("m.tool_calls and m.content and m.reasoning_content"), {"reasoning_with_text"}),
    "argument texts": (
        FULL.replace("call.function | tojson", "call.function.name ~ call.function.arguments.strip()"),
        {"argument_texts"},
    ),
    "no tool role": (refusing("m.role == 'tool'"), {*NO_CALLS, "loose_results"}),
    "results of calls": (
        refusing("m.role == 'tool' and not (messages[:loop.index0] | selectattr('tool_calls', 'defined') | list)"),
        {"loose_results"},
    ),
    "named results": (refusing("m.role == 'tool' and not m.name"), {"loose_results"}),
    "nine characters": (refusing("m.tool_call_id and m.tool_call_id | length != 9"), set()),
    "alternating": (ALTERNATING, {"repeats", "loose_results"}),
    "no empty text": (refusing("m.role != 'tool' and not m.tool_calls and not m.content"), {"empty"}),
    "no names": (FULL.replace("{{ ' ' ~ m.name if m.name }}", ""), {"names"}),
    "items": (FULL.replace("call.function | tojson", "call.function.name }}{{ call.function.arguments | items | list"), set()),
    "nothing but turns": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) or m.role in ('system', 'tool') %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}\n" + END,
        {*NO_CALLS, "system", "system_anywhere", "tools", "loose_results", "repeats", "names"},
    ),
}
