"""Drafters and the DraftTree that they propose. Imports no torch, and neither `server` nor `verify`."""
