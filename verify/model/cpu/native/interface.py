"""The functions of the compiled library that loading and runners call. Imports no torch."""

from __future__ import annotations

from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.cpu.native.loading import load, of_model
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.cpu.native.weights import BLOCK

__all__ = ["BLOCK", "NativeRunner", "compiled_library", "load", "of_model"]
