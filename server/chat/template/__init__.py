"""Chat templates: which text counts, what it can render, and conversations in the form that it takes."""

from outrider.server.chat.template.abilities import TemplateAbilities
from outrider.server.chat.template.chat_template import ChatTemplate, ChatTemplates
from outrider.server.chat.template.form import fit
from outrider.server.chat.template.tool_text import with_structures
from outrider.verify.chat_template import ERRORS as TEMPLATE_ERRORS

__all__ = ["TEMPLATE_ERRORS", "ChatTemplate", "ChatTemplates", "TemplateAbilities", "fit", "with_structures"]
