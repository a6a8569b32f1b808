"""The formats in which models write tool calls, as data.

A format says how calls are written, in the words of the models' published chat templates. The parser and the grammar of
enforced calls both follow it. Slots: %object (a JSON object with name and arguments), %name, %arguments (a JSON object),
%parameters (one `parameter` after the other, with %key, %value and %text, which says whether the value is text), %python (a
Python call), %fields (Gemma's values), %number (the call's number), %call_id (an id after [CALL_ID], which may be missing).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Words = tuple[str, ...]
# Models omit this opening of a list of calls.
BRACKET = "["


@dataclass(frozen=True)
class ToolFormat:
    """How one family of models writes calls. Words that are whitespace only are optional when a call is read."""

    name: str
    models: str
    call: Words
    markers: tuple[Words, ...]  # a chat template has this format if it contains all texts of one of these
    before: Words = ()  # text before the first call
    between: str = ""
    after: Words = ()  # text after the last call
    parameter: Words = ()  # form of %parameters
    key: str = "arguments"  # key of the arguments in %object
    bare: bool = False  # an answer may begin with a call without marker
    single: bool = False  # the model stops after a call
    also: tuple[str, ...] = ()  # formats that the parser accepts, too
    call_id: str = ""  # form of ids in the prompt, with %hash (nine letters and digits), %name, %number; empty: the client's

    @property
    def words(self) -> Words:
        """The words before and in the first call, without whitespace."""
        return tuple(word for word in (*self.before, *self.call) if word.strip())

    @property
    def opening(self) -> str:
        """The marker that begins the calls; empty if there is none."""
        first = self.words[0]
        return "" if is_slot(first) or first == BRACKET else first

    @property
    def first_word(self) -> str:
        """The first word of a call after the opening marker."""
        return next(word for word in self.call if word.strip() and word != self.opening)

    @property
    def enclosure(self) -> tuple[str, str]:
        """The text before the first call and after the last one; only brackets if no marker is needed."""
        before, after = (
            "".join(word for word in words if not self.bare or word in "[]") for words in (self.before, self.after)
        )
        return before, after


def is_slot(word: str) -> bool:
    """Whether the word stands for something else."""
    return word.startswith("%")


TAGGED = ("<function=", "%name", ">", "\n", "%parameters", "</function>", "\n")
KIMI_END = ("<|tool_call_end|>",)
# DeepSeek's markers contain full-width bars and block characters.
CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR = (
    f"<\uff5ctool\u2581{word}\uff5c>"
    for word in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
LIST: dict[str, Any] = {"call": ("%object",), "between": ", "}
DSML = "\uff5cDSML\uff5c"
DSML_CALL: dict[str, Any] = {
    "call": (f'<{DSML}invoke name="', "%name", '">', "\n", "%parameters", f"</{DSML}invoke>", "\n"),
    "parameter": (f'<{DSML}parameter name="', "%key", '" string="', "%text", '">', "%value", f"</{DSML}parameter>", "\n"),
}

TABLE = (
    ToolFormat(
        "qwen3_coder",
        "Qwen3-Coder, Qwen 3.5 and later",
        call=("<tool_call>", "\n", *TAGGED, "</tool_call>"),
        between="\n",
        parameter=("<parameter=", "%key", ">", "\n", "%value", "\n", "</parameter>", "\n"),
        markers=(("<tool_call>", "<function="),),
        also=("hermes",),
    ),
    ToolFormat(
        "glm47",
        "GLM 4.7 and later",
        call=("<tool_call>", "%name", "%parameters", "</tool_call>"),
        parameter=("<arg_key>", "%key", "</arg_key>", "<arg_value>", "%value", "</arg_value>"),
        markers=(("<tool_call>{function-name}<arg_key>",),),
    ),
    ToolFormat(
        "glm45",
        "GLM 4.5, 4.6",
        call=("<tool_call>", "%name", "\n", "%parameters", "</tool_call>"),
        between="\n",
        parameter=("<arg_key>", "%key", "</arg_key>", "\n", "<arg_value>", "%value", "</arg_value>", "\n"),
        markers=(("<tool_call>", "<arg_key>"),),
    ),
    ToolFormat(
        "minimax_m2",
        "MiniMax M2",
        before=("<minimax:tool_call>", "\n"),
        call=('<invoke name="', "%name", '">', "\n", "%parameters", "</invoke>", "\n"),
        after=("</minimax:tool_call>",),
        parameter=('<parameter name="', "%key", '">', "%value", "</parameter>", "\n"),
        markers=(("<minimax:tool_call>", "<invoke name="),),
    ),
    ToolFormat(
        "seed_oss",
        "Seed-OSS",
        call=("<seed:tool_call>", "\n", *TAGGED, "</seed:tool_call>"),
        between="\n",
        parameter=("<parameter=", "%key", ">", "%value", "</parameter>", "\n"),
        markers=(("<seed:tool_call>", "<function="),),
    ),
    ToolFormat(
        "hermes",
        "Hermes, Qwen 2.5, Qwen 3, Granite 4 and others",
        call=("<tool_call>", "\n", "%object", "\n", "</tool_call>"),
        between="\n",
        markers=(("<tool_call>",),),
        also=("qwen3_coder",),  # Qwen Code's prompt has examples in that format
    ),
    ToolFormat(
        "mistral_args",
        "Devstral, Magistral, Ministral 3, Mistral Small 3.2",
        call=("[TOOL_CALLS]", "%name", "%call_id", "[ARGS]", "%arguments"),
        markers=(("[TOOL_CALLS]", "[ARGS]"),),
        also=("mistral",),
        call_id="%hash",
    ),
    ToolFormat(
        "mistral",
        "Mistral 7B v0.3, Nemo, Large, Small 3.1",
        before=("[TOOL_CALLS]", "["),
        **LIST,
        after=("]",),
        markers=(("[TOOL_CALLS]",),),
        also=("mistral_args",),
        call_id="%hash",
    ),
    ToolFormat(
        "deepseek_v3",
        "DeepSeek V3, R1",
        before=(CALLS_BEGIN,),
        call=(CALL_BEGIN, "function", SEPARATOR, "%name", "\n", "```json", "\n", "%arguments", "\n", "```", CALL_END),
        between="\n",
        after=(CALLS_END,),
        markers=((CALLS_BEGIN, "```json"),),
    ),
    ToolFormat(
        "deepseek_v31",
        "DeepSeek V3.1",
        before=(CALLS_BEGIN,),
        call=(CALL_BEGIN, "%name", SEPARATOR, "%arguments", CALL_END),
        after=(CALLS_END,),
        markers=((CALLS_BEGIN,),),
    ),
    ToolFormat(
        "deepseek_v32",
        "DeepSeek V3.2",
        before=(f"<{DSML}function_calls>", "\n"),
        **DSML_CALL,
        after=(f"</{DSML}function_calls>",),
        markers=((DSML, "function_calls>"),),
        also=("deepseek_v4",),
    ),
    ToolFormat(
        "deepseek_v4",
        "DeepSeek V4",
        before=(f"<{DSML}tool_calls>", "\n"),
        **DSML_CALL,
        after=(f"</{DSML}tool_calls>",),
        markers=((DSML, "tool_calls>"),),
        also=("deepseek_v32",),
    ),
    ToolFormat(
        "kimi_k2",
        "Kimi K2",
        before=("<|tool_calls_section_begin|>",),
        call=(
            "<|tool_call_begin|>",
            "functions.",
            "%name",
            ":",
            "%number",
            "<|tool_call_argument_begin|>",
            "%arguments",
            *KIMI_END,
        ),
        after=("<|tool_calls_section_end|>",),
        markers=(("<|tool_calls_section_begin|>",), ("<|im_middle|>", "tool_declare")),
        call_id="functions.%name:%number",
    ),
    ToolFormat(
        "gemma4",
        "Gemma 4",
        call=("<|tool_call>", "call:", "%name", "%fields", "<tool_call|>"),
        markers=(("<|tool_call>call:",),),
    ),
    ToolFormat(
        "lfm2_json",
        "LFM2 with tools in JSON",
        before=("<|tool_call_start|>", "["),
        **LIST,
        after=("]", "<|tool_call_end|>"),
        markers=(("<|tool_call_start|>", '{"name": "'),),
        also=("lfm2",),
    ),
    ToolFormat(
        "lfm2",
        "LFM2, LFM2.5",
        before=("<|tool_call_start|>", "["),
        call=("%python",),
        between=", ",
        after=("]", "<|tool_call_end|>"),
        markers=(("<|tool_call_start|>",), ("<|tool_list_start|>",), ("<|im_start|>", "List of tools: [")),
        also=("lfm2_json",),
    ),
    ToolFormat(
        "phi4_mini",
        "Phi-4-mini",
        before=("<|tool_call|>", "["),
        **LIST,
        after=("]", "<|/tool_call|>"),
        markers=(("<|tool|>", "<|/tool|>"), ("<|tool_call|>", "<|/tool_call|>")),
        also=("functools",),
    ),
    ToolFormat(
        "functools",
        "Phi-4-mini, prompted for functools",
        before=("functools", "["),
        **LIST,
        after=("]",),
        markers=(("functools[",),),
        also=("phi4_mini",),
    ),
    ToolFormat("granite", "Granite 3", before=("<|tool_call|>", "["), **LIST, after=("]",), markers=(("<|tool_call|>",),)),
    ToolFormat(
        "harmony",
        "gpt-oss",
        call=("<|channel|>", "commentary to=functions.", "%name", " ", "<|constrain|>", "json", "<|message|>", "%arguments"),
        single=True,
        markers=(("<|channel|>", "<|message|>"),),
    ),
    ToolFormat(
        "llama4_pythonic",
        "Llama 4, prompted for Python calls",
        before=("<|python_start|>", "["),
        call=("%python",),
        between=", ",
        after=("]", "<|python_end|>"),
        bare=True,
        markers=(("[func_name1(", "<|header_start|>"),),
        also=("llama4_json",),
    ),
    ToolFormat(
        "pythonic",
        "Llama 3.2, prompted for Python calls",
        before=("[",),
        call=("%python",),
        between=", ",
        after=("]",),
        bare=True,
        markers=(("[func_name1(",),),
    ),
    ToolFormat(
        "llama4_json",
        "Llama 4",
        before=("<|python_start|>", "<|python_end|>"),
        call=("%object",),
        after=("<|python_end|>",),
        key="parameters",
        bare=True,
        markers=(("<|header_start|>", '"parameters": dictionary'),),
        also=("llama4_pythonic",),
    ),
    ToolFormat(
        "llama3",
        "Llama 3.1 and later",
        before=("<|python_tag|>",),
        call=("%object",),
        between="; ",
        key="parameters",
        bare=True,
        markers=(("<|python_tag|>",), ('"parameters": dictionary',)),
    ),
)
# Further markers, which slots stand for or which end the messages of an answer.
EXTRA_MARKERS: Mapping[str, frozenset[str]] = {
    "harmony": frozenset(("<|start|>", "<|end|>", "<|call|>", "<|return|>")),
    "gemma4": frozenset(('<|"|>',)),
    "mistral_args": frozenset(("[CALL_ID]",)),
    "mistral": frozenset(("[CALL_ID]",)),
}
FORMATS: Mapping[str, ToolFormat] = {format.name: format for format in TABLE}


def detect_format(template: str) -> ToolFormat | None:
    """The format whose markers a chat template contains; None if it contains no format's."""
    for format in TABLE:
        if any(all(text in template for text in texts) for texts in format.markers):
            return format
    return None


def markers_of(format: ToolFormat) -> frozenset[str]:
    """The texts around and in the format's calls, and those of the formats that its parser also reads."""
    formats = (format, *(FORMATS[name] for name in format.also))
    words = (word for each in formats for word in (*each.before, *each.call, *each.after, *each.parameter))
    return frozenset(word for word in words if word.strip() and not is_slot(word)) | EXTRA_MARKERS.get(format.name, frozenset())
