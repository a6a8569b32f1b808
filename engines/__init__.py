"""Outrider's drafts in other engines: one module for each, which needs that engine and the drafters alone."""
