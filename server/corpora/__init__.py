"""Corpora: clients' own texts, from which drafts of their requests are taken. Routes, bounds, and the process that indexes."""
