"""Tool calls: the formats in which models write them, their incremental parsers, and the grammars that enforce them."""

from outrider.server.chat.tools.call_ids import with_model_ids
from outrider.server.chat.tools.formats import FORMATS, ToolFormat, detect_format, markers_of
from outrider.server.chat.tools.grammar import calls_grammar
from outrider.server.chat.tools.parser import tool_parser
from outrider.server.chat.tools.parts import Part, ToolParser, merge_parts

__all__ = [
    "FORMATS",
    "Part",
    "ToolFormat",
    "ToolParser",
    "calls_grammar",
    "detect_format",
    "markers_of",
    "merge_parts",
    "tool_parser",
    "with_model_ids",
]
