"""JSON schemas of clients, of any draft, made ready for grammars: normalised, and relaxed where no grammar can enforce them."""
