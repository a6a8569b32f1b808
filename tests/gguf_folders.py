"""The model and the tokenizer in a folder as a GGUF file."""

from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM

from outrider.verify.tokenizer import load_tokenizer
from tests.verify.gguf.test_tokenizer import entries_from
from tests.verify.model.cpu.native.files import write_gguf


def write_folder(folder: Path, file: Path, kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> None:
    """Writes matrices of this type, and a tokenizer of bytes."""
    tokenizer = load_tokenizer(str(folder))
    entries = entries_from(tokenizer.backend_tokenizer, pre="default", eos_token_id=tokenizer.eos_token_id)
    if tokenizer.chat_template:
        entries["tokenizer.chat_template"] = str(tokenizer.chat_template)
    write_gguf(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), file, kind, entries)
