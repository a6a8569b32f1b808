"""What an answer may contain: grammars, and limits of reasoning."""
