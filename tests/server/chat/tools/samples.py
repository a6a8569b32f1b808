"""Samples of each format, written as the models' published chat templates write calls, and texts that are not quite calls."""

from dataclasses import dataclass
from typing import Any

TAGS = {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3}
EXACT = {"type": ["boolean", "null"]}
WHERE = {"city": {"type": "string", "maxLength": 40}, "days": {"type": "integer"}, "tags": TAGS, "exact": EXACT}
FUNCTIONS: dict[str, Any] = {
    "get_weather": {"type": "object", "properties": WHERE, "required": ["city", "days"], "additionalProperties": False},
    "clock": {"type": "object", "properties": {}, "additionalProperties": False},
}
Call = tuple[str, dict[str, Any]]
WEATHER: Call = ("get_weather", {"city": 'San "José"', "days": 3, "tags": ["a", "b c"]})
CLOCK: Call = ("clock", {})
CITY = '{"city": "San \\"José\\"", "days": 3, "tags": ["a", "b c"]}'  # the arguments as JSON
OBJECTS = f'[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "clock", "arguments": {{}}}}]'


@dataclass(frozen=True)
class Sample:
    """A published way to write calls."""

    format: str
    template: str  # what the chat template contains
    text: str
    calls: tuple[Call, ...] = (WEATHER, CLOCK)
    odd: str = ""  # a call with a field or an argument that the tool does not have
    odd_call: Call = WEATHER
    streamed: bool = True  # arguments are passed on while they are written
    enforced: bool = True  # required calls are written so
    broken: tuple[str, ...] = ()  # not calls


def bars(text: str) -> str:
    """DeepSeek's markers: full-width bars, and block characters for spaces."""
    return text.replace("<|", "<\uff5c").replace("|>", "\uff5c>").replace("_", "\u2581")


QWEN_CITY = '<parameter=city>\nSan "José"\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
SEED_CITY = '<parameter=city>San "José"</parameter>\n<parameter=days>3</parameter>\n'
GLM_CITY = '<arg_key>city</arg_key>\n<arg_value>San "José"</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n'
MINIMAX_CITY = '<parameter name="city">San "José"</parameter>\n<parameter name="days">3</parameter>\n'
ODD: Call = ("get_weather", {"city": 'San "José"', "days": 3, "more": [1], "what": "x y"})
GLM47_CITY = GLM_CITY.replace("\n", "")
DSML = "\uff5cDSML\uff5c"
DSML_CITY = (
    f'<{DSML}parameter name="city" string="true">San "José"</{DSML}parameter>\n'
    f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n'
)
DSML_CALLS = (
    f'<{DSML}invoke name="get_weather">\n{DSML_CITY}'
    f'<{DSML}parameter name="tags" string="false">["a", "b c"]</{DSML}parameter>\n'
    f'</{DSML}invoke>\n<{DSML}invoke name="clock">\n</{DSML}invoke>\n'
)
DSML_ODD = (
    f'<{DSML}invoke name="get_weather">\n{DSML_CITY}<{DSML}parameter name="more" string="false">[1]</{DSML}parameter>\n'
    f'<{DSML}parameter name="what" string="true">x y</{DSML}parameter>\n</{DSML}invoke>\n'
)
PYTHON_CALLS = "[get_weather(city='San \"José\"', days=3, tags=[\"a\", 'b c']), clock()]"
PYTHON_ODD = "[get_weather(city='a', more={'k': None}, x=true)]"
PYTHON_ODD_CALL: Call = ("get_weather", {"city": "a", "more": {"k": None}, "x": True})
FUNCTION, CALLED = bars("<|tool_call_begin|>function<|tool_sep|>"), bars("<|tool_call_end|>")
BEGIN, END = bars("<|tool_calls_begin|>"), bars("<|tool_calls_end|>")

SAMPLES = (
    Sample(
        "hermes",
        'return a json object within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>',
        f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
        odd=f'<tool_call>{{"id": 7, "name": "get_weather", "extra": {{"a": [1]}}, "arguments": {CITY}}}</tool_call>',
        broken=("<tool_call>", "<tool_call>none</tool_call>", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name'),
    ),
    Sample(
        "qwen3_coder",
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>",
        f"<tool_call>\n<function=get_weather>\n{QWEN_CITY}"
        '<parameter=tags>\n["a", "b c"]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        odd=f"<tool_call>\n<function=get_weather>\n{QWEN_CITY}<parameter=more>\n[1]\n</parameter>\n"
        "<parameter=what>\nx y\n</parameter>\n</function>\n</tool_call>",
        odd_call=ODD,
        broken=("<tool_call>\n<function=f>\nwhat?", "<tool_call>\n<function>x</function>", "<tool_call>\n<function=f>"),
    ),
    Sample(
        "seed_oss",
        "<seed:tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>value_1</parameter>\\n",
        f"<seed:tool_call>\n<function=get_weather>\n{SEED_CITY}"
        '<parameter=tags>["a", "b c"]</parameter>\n</function>\n</seed:tool_call>\n'
        "<seed:tool_call>\n<function=clock>\n</function>\n</seed:tool_call>",
        odd=f"<seed:tool_call>\n<function=get_weather>\n{SEED_CITY}<parameter=more>[1]</parameter>\n"
        "<parameter=what>x y</parameter>\n</function>\n</seed:tool_call>",
        odd_call=ODD,
        broken=("<seed:tool_call>x", "<seed:tool_call>\n<function=f>\n<parameter"),
    ),
    Sample(
        "minimax_m2",
        "<minimax:tool_call> <invoke name=\"' + tool_call.name + '\">\\n <parameter name=",
        f'<minimax:tool_call>\n<invoke name="get_weather">\n{MINIMAX_CITY}<parameter name="tags">["a", "b c"]</parameter>\n'
        '</invoke>\n<invoke name="clock">\n</invoke>\n</minimax:tool_call>',
        odd=f'<minimax:tool_call>\n<invoke name="get_weather">\n{MINIMAX_CITY}<parameter name="more">[1]</parameter>\n'
        '<parameter name="what">x y</parameter>\n</invoke>\n</minimax:tool_call>',
        odd_call=ODD,
        broken=("<minimax:tool_call>x", '<minimax:tool_call>\n<invoke name="f">no'),
    ),
    Sample(
        "glm45",
        "<tool_call>{function-name}\\n<arg_key>{arg-key-1}</arg_key>\\n<arg_value>{arg-value-1}</arg_value>",
        f'<tool_call>get_weather\n{GLM_CITY}<arg_key>tags</arg_key>\n<arg_value>["a", "b c"]</arg_value>\n</tool_call>\n'
        "<tool_call>clock\n</tool_call>",
        odd=f"<tool_call>get_weather{GLM_CITY}<arg_key>more</arg_key><arg_value>[1]</arg_value>"
        "<arg_key>what</arg_key><arg_value>x y</arg_value></tool_call>",
        odd_call=ODD,
        broken=("<tool_call>a word", "<tool_call>f\n<arg_key>a</arg_key>\nno", "<tool_call>f"),
    ),
    Sample(
        "glm47",
        "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>...</tool_call>",
        f'<tool_call>get_weather{GLM47_CITY}<arg_key>tags</arg_key><arg_value>["a", "b c"]</arg_value></tool_call>'
        "<tool_call>clock</tool_call>",
        odd=f"<tool_call>get_weather{GLM47_CITY}<arg_key>more</arg_key><arg_value>[1]</arg_value>"
        "<arg_key>what</arg_key><arg_value>x y</arg_value></tool_call>",
        odd_call=ODD,
        broken=("<tool_call>a word", "<tool_call>f<arg_key>a</arg_key>no", "<tool_call>f"),
    ),
    Sample(
        "mistral",
        '{{- "[TOOL_CALLS] [" }}',
        f"[TOOL_CALLS]{OBJECTS}",
        odd=f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {CITY}, "id": "123456789"}}]',
        broken=("[TOOL_CALLS]", "[TOOL_CALLS][1]", "[TOOL_CALLS][[x]]"),
    ),
    Sample(
        "mistral",
        "{{- '[TOOL_CALLS][' }} {{- '\", \"arguments\": ' + arguments + ', \"id\": \"' + id + '\"}' }}",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {CITY}, "id": "abcdef012"}}, '
        '{"name": "clock", "arguments": {}, "id": "345678abc"}]',
        enforced=False,
    ),
    Sample(
        "mistral_args",
        "{{- '[TOOL_CALLS]' }} {{- name + '[CALL_ID]' + id + '[ARGS]' + arguments }}",
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdef012[ARGS]{CITY}[TOOL_CALLS]clock[CALL_ID]345678abc[ARGS]{{}}",
        enforced=False,
        broken=("[TOOL_CALLS]f[CALL_ID]", "[TOOL_CALLS]f[CALL_ID]abc", "[TOOL_CALLS]f[CALL_ID]abc[ARGS]none"),
    ),
    Sample(
        "mistral_args",
        "[TOOL_CALLS]\" + tool['function']['name'] + \"[ARGS]\" + arguments",
        f"[TOOL_CALLS]get_weather[ARGS]{CITY}[TOOL_CALLS]clock[ARGS]{{}}",
        broken=("[TOOL_CALLS]f[ARGS]none", "[TOOL_CALLS]f", "[TOOL_CALLS]f {}"),
    ),
    Sample(
        "deepseek_v3",
        BEGIN + FUNCTION + "<function_name>\\n```json",
        f"{BEGIN}{FUNCTION}get_weather\n```json\n{CITY}\n```{CALLED}\n{FUNCTION}clock\n```json\n{{}}\n```{CALLED}{END}",
        broken=(BEGIN, f"{BEGIN}{FUNCTION}f\n```python"),
    ),
    Sample(
        "deepseek_v31",
        bars("'<|tool_calls_begin|><|tool_call_begin|>'+ tool['function']['name'] + '<|tool_sep|>'"),
        f"{BEGIN}{bars('<|tool_call_begin|>')}get_weather{bars('<|tool_sep|>')}{CITY}{CALLED}"
        f"{bars('<|tool_call_begin|>')}clock{bars('<|tool_sep|>')}{{}}{CALLED}{END}",
        broken=(f"{BEGIN}x", f"{BEGIN}{bars('<|tool_call_begin|>')}f{bars('<|tool_sep|>')}[]"),
    ),
    Sample(
        "deepseek_v32",
        f"{{%- set dsml_token = '{DSML}' -%}} <{{{{ dsml_token }}}}function_calls> <{{{{ dsml_token }}}}invoke name=",
        f"<{DSML}function_calls>\n{DSML_CALLS}</{DSML}function_calls>",
        odd=f"<{DSML}function_calls>\n{DSML_ODD}</{DSML}function_calls>",
        odd_call=ODD,
        broken=(f"<{DSML}function_calls>x", f'<{DSML}function_calls>\n<{DSML}invoke name="f">no', f"<{DSML}invoke>"),
    ),
    Sample(
        "deepseek_v4",
        f"{{%- set dsml_token = '{DSML}' -%}} <{{{{ dsml_token }}}}tool_calls> <{{{{ dsml_token }}}}invoke name=",
        f"<{DSML}tool_calls>\n{DSML_CALLS}</{DSML}tool_calls>",
        odd=f"<{DSML}tool_calls>\n{DSML_ODD}</{DSML}tool_calls>",
        odd_call=ODD,
        broken=(f"<{DSML}tool_calls>x",),
    ),
    Sample(
        "kimi_k2",
        "<|tool_calls_section_begin|> <|tool_call_begin|>{{ formatted_id }}<|tool_call_argument_begin|>",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{CITY}"
        "<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        broken=("<|tool_calls_section_begin|>x", "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:a"),
    ),
    Sample(
        "gemma4",
        "{{- '<|tool_call>call:' + function['name'] + '{' -}}",
        '<|tool_call>call:get_weather{city:<|"|>San "José"<|"|>,days:3,tags:[<|"|>a<|"|>,<|"|>b c<|"|>]}<tool_call|>'
        "<|tool_call>call:clock{}<tool_call|>",
        odd='<|tool_call>call:get_weather{city:<|"|>San "José"<|"|>, days: 3, more:{<|"|>k<|"|>:[true,{}]}}<tool_call|>',
        odd_call=("get_weather", {"city": 'San "José"', "days": 3, "more": {"k": [True, {}]}}),
        broken=("<|tool_call>x", "<|tool_call>call:f[]"),
    ),
    Sample(
        "lfm2",
        '{{- "<|tool_call_start|>[" + (tool_calls_ns.tool_calls | join(", ")) + "]<|tool_call_end|>" -}}',
        f"<|tool_call_start|>{PYTHON_CALLS}<|tool_call_end|>",
        odd=f"<|tool_call_start|>{PYTHON_ODD}<|tool_call_end|>",
        odd_call=PYTHON_ODD_CALL,
        streamed=False,
        broken=("<|tool_call_start|>[f(1)]", "<|tool_call_start|>[f(a=b)]<|tool_call_end|>", "<|tool_call_start|>[f(a='"),
    ),
    Sample(
        "lfm2",
        '"List of tools: [" -%} {{- "<|im_start|>system\\n" + ns.system_prompt + "<|im_end|>\\n" -}}',
        "<|tool_call_start|>[get_weather(city='San \"José\"', days=3, tags=['a', 'b c']), clock()]<|tool_call_end|>",
        streamed=False,
        enforced=False,
    ),
    Sample(
        "lfm2_json",
        '"<|tool_call_start|>[" + ns_tc.result + \'{"name": "\' + tc["function"]["name"]',
        f"<|tool_call_start|>{OBJECTS}<|tool_call_end|>",
        odd=f'<|tool_call_start|>[{{"name": "get_weather", "arguments": {CITY}, "id": "1"}}]<|tool_call_end|>',
        broken=("<|tool_call_start|>[{}]",),
    ),
    Sample(
        "granite",
        "respond only with <|tool_call|> followed by a JSON list of tools used",
        f"<|tool_call|>{OBJECTS}",
        odd=f'<|tool_call|>[{{"name": "get_weather", "arguments": {CITY}, "id": "1"}}]',
        broken=("<|tool_call|>[]", "<|tool_call|>[none]"),
    ),
    Sample(
        "phi4_mini",
        '<|tool|> <|/tool|> respond in this format: <|tool_call|>{"name": "foo", "arguments": {"a": 1}}<|/tool_call|>',
        f"<|tool_call|>{OBJECTS}<|/tool_call|>",
        odd=f'<|tool_call|>{{"name": "get_weather", "arguments": {CITY}, "id": "1"}}<|/tool_call|>',
        broken=("<|tool_call|>[]<|/tool_call|>",),
    ),
    Sample(
        "phi4_mini",
        "{{- '<|tool_call|>' + (tool_call['function'] | tojson) + '<|/tool_call|>' -}}",
        f'<|tool_call|>{{"name": "get_weather", "arguments": {CITY}}}<|/tool_call|>'
        '<|tool_call|>{"name": "clock", "arguments": {}}<|/tool_call|>',
        enforced=False,
    ),
    Sample(
        "functools",
        'functools[{"name": [function name], "arguments": [function arguments as JSON]}, ...]',
        f"functools{OBJECTS}",
        odd=f'functools[{{"name": "get_weather", "arguments": {CITY}, "id": "1"}}]',
        broken=("from functools import cache", "functools[1]"),
    ),
    Sample(
        "harmony",
        '{{- "functions." + tool_call.name + "<|channel|>commentary " }} json<|message|>',
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CITY}<|call|>",
        calls=(WEATHER,),
        odd=f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{CITY}<|call|>",
        broken=("<|channel|>what<|message|>x", "<|channel|>commentary to=python<|message|>1+1", "<|channel|>comm", "x <|ch"),
    ),
    Sample(
        "pythonic",
        "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
        PYTHON_CALLS,
        odd=PYTHON_ODD,
        odd_call=PYTHON_ODD_CALL,
        streamed=False,
        broken=("[1, 2](3)", "[f(1)]", "[f(**x)]", "[f(a=1, b=g())]", "[]", "[f(a=1"),
    ),
    Sample(
        "llama4_pythonic",
        "<|header_start|> Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
        PYTHON_CALLS,
        odd=f"<|python_start|>{PYTHON_ODD}<|python_end|>",
        odd_call=PYTHON_ODD_CALL,
        streamed=False,
        broken=("<|python_start|>print(1)<|python_end|>", "[f(1)]"),
    ),
    Sample(
        "llama4_json",
        '<|header_start|> Respond in the format {"name": function name, "parameters": dictionary of argument name and its',
        f'{{"name": "get_weather", "parameters": {CITY}}}{{"name": "clock", "parameters": {{}}}}',
        odd=f'<|python_start|>{{"name": "get_weather", "parameters": {CITY}, "type": "function"}}<|python_end|>',
        broken=("<|python_start|>1 + 1<|python_end|>", "<|python_start|><|python_end|>[]", '{"name": "f", "para'),
    ),
    Sample(
        "llama4_json",
        "<|header_start|> {{- '<|python_start|>' }} {{- '<|python_end|>' }} \"parameters\": dictionary of argument name",
        f'<|python_start|><|python_end|>{{"name": "get_weather", "parameters": {CITY}}}{{"name": "clock", "parameters": {{}}}}',
        enforced=False,
    ),
    Sample(
        "llama3",
        '{{- \'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.\' }}',
        f'{{"name": "get_weather", "parameters": {CITY}}}; {{"name": "clock", "parameters": {{}}}}',
        odd=f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {CITY}}}',
        broken=('{"answer": 42}', '{"name": "Ada", "age": 36}', '{"name": 5, "parameters": {}}', "{", '{"name": "f", "para'),
    ),
)
