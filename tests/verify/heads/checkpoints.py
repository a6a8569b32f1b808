"""Checkpoints of small random targets and of draft heads for them, in the published layouts."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.verify.heads.loading import load_head
from outrider.verify.heads.model import HeadModel
from outrider.verify.heads.networks import Eagle3Head, EagleHead
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner
from tests.verify.model.families import FAMILIES, SIZES, build, config_of

KINDS = ("eagle", "eagle3", "deep eagle3", "mtp")
LAYERS_READ = (2, 3, 3)  # the default of a target with six layers
DRAFT_VOCABULARY = 60


def llama_config(layers: int) -> LlamaConfig:
    config: LlamaConfig = config_of("llama", NAME, num_hidden_layers=layers, max_position_embeddings=256)
    return config


def randomised(module: torch.nn.Module, seed: int = 5) -> torch.nn.Module:
    """The module with other random weights, wide enough that no choice is a near-tie."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module


def save_target(folder: Path, family: str = "llama") -> Path:
    """Saves a target: a Llama of six layers, or a model of another family with the weights of one MTP layer."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(llama_config(6)) if family == "llama" else build_family(family)
    model.save_pretrained(folder)
    if family != "llama":
        add_mtp_layer(folder, family, model)
    return folder


def build_family(family: str) -> Any:
    """A random model whose last layer has attention, as in the published ones."""
    types = FAMILIES[family][1].get("layer_types", [])
    return build(family, NAME, **({"layer_types": [*types[::-1][1:], "full_attention"]} if types else {}))


def add_mtp_layer(folder: Path, family: str, model: Any) -> None:
    """Adds the weights of an MTP layer as the family's checkpoints name them: like the last layer with attention."""
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    source, size = f"model.layers.{config['num_hidden_layers'] - 1}.", config["hidden_size"]
    if family.startswith("qwen"):
        prefix, config["mtp_num_hidden_layers"] = "mtp.layers.0.", 1
        around = {"mtp.fc": (size, 2 * size), "mtp.pre_fc_norm_embedding": (size,)}
        around |= {"mtp.pre_fc_norm_hidden": (size,), "mtp.norm": (size,)}
    else:
        prefix = f"model.layers.{config['num_hidden_layers']}."
        around = {f"{prefix}eh_proj": (size, 2 * size), f"{prefix}enorm": (size,), f"{prefix}hnorm": (size,)}
        around |= {f"{prefix}shared_head.norm": (size,)}
    torch.manual_seed(7)
    new = {name.replace(source, prefix): tensor.clone() for name, tensor in weights.items() if name.startswith(source)}
    new |= {f"{name}.weight": 0.2 * torch.randn(shape) for name, shape in around.items()}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights | new, folder / "model.safetensors", {"format": "pt"})


def save_eagle(folder: Path, target_size: int = SIZES["hidden_size"], **others: Any) -> Path:
    """Saves an EAGLE head for the Llama target, as its authors do: in torch's format, and named like a model."""
    sizes = {"hidden_size": target_size}
    config = LlamaConfig(**{**llama_config(1).to_dict(), **sizes, **others})
    head = randomised(EagleHead(config, bias=True))
    return save_head(folder, head.state_dict(), {"architectures": ["LlamaForCausalLM"], **sizes, **others})


def save_eagle3(folder: Path, layers: int = 1, **others: Any) -> Path:
    """Saves an EAGLE-3 head for the Llama target, with a vocabulary of its own."""
    head = randomised(Eagle3Head(llama_config(layers), LAYERS_READ, SIZES["hidden_size"], DRAFT_VOCABULARY))
    own = "midlayer." if layers == 1 else "layers.0."
    weights = {name.replace("layers.0.", own): tensor for name, tensor in head.state_dict().items()}
    ids = torch.arange(DRAFT_VOCABULARY)
    weights |= {"d2t": ids // 2, "t2d": torch.isin(torch.arange(SIZES["vocab_size"]), ids + ids // 2)}
    names = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCABULARY, "num_hidden_layers": layers}
    return save_head(folder, weights, names | others)


def save_head(folder: Path, weights: dict[str, torch.Tensor], names: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama_config(1).to_dict() | names))
    torch.save(weights, folder / "pytorch_model.bin")
    return folder


def load_pair(folder: Path, kind: str, family: str = "qwen3_5", device: str = "cpu") -> tuple[ModelRunner, HeadModel]:
    """A started target with a head of this kind; the family is that of a target with an MTP layer."""
    is_mtp = kind == "mtp"
    path = folder / (family if is_mtp else "target")
    if not path.exists():
        save_target(path, family if is_mtp else "llama")
    target = load_weights(LoadOptions(str(path), dtype="float32", device=device, backend="torch"))
    savers: dict[str, Callable[[Path], Path]] = {
        "eagle": partial(save_eagle, num_hidden_layers=2, architectures=["EagleLlamaForCausalLM"]),
        "eagle3": save_eagle3,
        "deep eagle3": partial(save_eagle3, layers=3),
    }
    torch.manual_seed(0)  # a head in the same folder has the same weights
    place = "mtp" if is_mtp else str(savers[kind](folder / kind))
    head = cast(HeadModel, load_head(place, target))
    target.start(target.context_tokens)
    head.start(target.context_tokens)
    return target, head
