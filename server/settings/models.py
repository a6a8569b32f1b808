"""Settings of the models: the target and the draft model, how they are loaded, and on which devices."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from outrider import models
from outrider.models import packaged
from outrider.server.settings.section import Section
from outrider.verify.checkpoint import DEFAULT_REVISION, GGUF

# Every chunk of a stream repeats the model's name.
NAME_CHARACTERS = 256
Quantize = Literal["none", "int8", "int4"]
KVDtype = Literal["auto", "int8", "fp8"]


def check_devices(names: str) -> str:
    """The devices of a model, separated by commas or plus signs, without spaces. Raises ValueError."""
    names = names.replace(" ", "")
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", names):
        return names
    if not re.fullmatch(r"cuda:\d+((,cuda:\d+)+|(\+cuda:\d+)+)", names):
        raise ValueError("it must be auto, cpu, cuda, cuda:N, or several GPUs such as cuda:0,cuda:1 or cuda:0+cuda:1")
    devices = re.split(r"[,+]", names)
    if len(set(devices)) < len(devices):
        raise ValueError("it must name each GPU once")
    return names


Devices = Annotated[str, AfterValidator(check_devices)]


def locate_model(path: str) -> str:
    """The file of a model that has a name here; any other path as it is. Raises ValueError."""
    is_short = path.lower().startswith("smol") and packaged.SMOLLM2.lower().startswith(path.lower())
    if is_short and path != packaged.SMOLLM2 and not Path(path).exists():
        raise ValueError(f"there is no model {path!r}; did you mean {packaged.SMOLLM2}?")
    if path not in packaged.NAMES:
        return str(models.TARGET) if path == models.NAME else path
    file = packaged.place(path)
    if not file.is_file():
        raise ValueError(f"{path} is not on this machine; download it with `outrider pull {path}`")
    return str(file)


ModelPath = Annotated[str, AfterValidator(locate_model)]

# docs/tools.md describes them.
ToolFormat = Literal[
    "auto",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "functools",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "harmony",
    "hermes",
    "kimi_k2",
    "lfm2",
    "lfm2_json",
    "llama3",
    "llama4_json",
    "llama4_pythonic",
    "minimax_m2",
    "mistral",
    "mistral_args",
    "phi4_mini",
    "pythonic",
    "qwen3_coder",
    "seed_oss",
]


def tagged(name: str) -> str:
    """A name with Ollama's tag: without one, it means `latest`."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


class Model(Section):
    """The target model."""

    path: ModelPath = Field(
        str(models.TARGET),
        description="Local folder, GGUF file, Hugging Face id or owner/name:Q4_K_M, or Ollama's name. Without one, "
        f"`outrider serve` downloads {packaged.SMOLLM2}, and other commands take {models.NAME}.",
        json_schema_extra={"default": "the embedded model"},
    )
    revision: str = Field(
        DEFAULT_REVISION, min_length=1, description="Branch, tag or commit of a Hugging Face id; a commit pins the model."
    )
    name: str | None = Field(None, description="Model name in the API; null uses the last part of the path.")
    aliases: tuple[str, ...] = Field(
        (), description="Further names of the model; * and ? are wildcards, and * alone allows every name."
    )
    adapters: Mapping[str, str] = Field(
        {}, description="LoRA adapters, as peft saves them: folders or Hugging Face ids by name."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of the weights, also of a draft model's; auto uses the checkpoints'."
    )
    quantize: Quantize = Field("none", description="Format of the linear layers' weights.")
    kv_dtype: KVDtype = Field("auto", description="Data type of cached keys and values; auto uses the model's.")
    device: Devices = Field(
        "auto",
        description="auto (a GPU if there is one), cpu, cuda, cuda:N, or several GPUs: cuda:0,cuda:1 share the layers, and "
        "cuda:0+cuda:1 each layer, for speed.",
    )
    context_tokens: int | None = Field(
        None, ge=16, description="Context length; null uses the model's maximum, or less if memory does not hold it."
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads of the worker; null uses one per core, or one for a small model."
    )
    backend: Literal["auto", "outrider", "torch", "llama.cpp"] = Field(
        "auto",
        description="What computes the model: Outrider's kernels where they can, PyTorch alone, or llama.cpp for GGUF files; "
        "auto is llama.cpp if only it has a GPU, and else outrider.",
    )
    invariant: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Compute each row with the same bits in every step, so that drafts change no answer. The CPU's library "
        "always does; on a GPU, auto does if the kernels can. on refuses to start elsewhere.",
    )
    tool_format: ToolFormat = Field(
        "auto", description="Format of the model's tool calls, see docs/tools.md; auto detects it from the chat template."
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto", description="Sampling defaults: auto uses those of generation_config.json or the GGUF file, none the API's."
    )
    packed_folder: Path | None = Field(
        Path("~/.cache/outrider/packed"),
        description="Folder of packed weights, which later starts and other servers map; null packs them at every start.",
    )
    trust_remote_code: bool = Field(
        False, description="Run code from the model's folder, and the draft model's, with all rights of the server."
    )

    @property
    def place(self) -> tuple[str, str]:
        return self.path, self.revision

    @property
    def served_name(self) -> str:
        file = self.path.rstrip("/").rsplit("/", 1)[-1].removesuffix(GGUF)
        return (
            self.name
            or {str(models.TARGET): models.NAME}.get(self.path)
            or {packaged.SMOLLM2_FILE.removesuffix(GGUF): packaged.SMOLLM2}.get(file, file)
        )

    def is_named(self, name: str) -> bool:
        """Whether this is the served name, perhaps with the tag `latest`; the name of a GGUF file may have its ending."""
        is_file = self.name is None and self.path.endswith(GGUF)
        return tagged(name) == tagged(self.served_name) or (is_file and name == self.served_name + GGUF)

    def answers_to(self, name: str) -> bool:
        """Whether a request of this name is for this model: by its own name, an adapter's or an alias."""
        is_alias = len(name) <= NAME_CHARACTERS and any(fnmatchcase(name, alias) for alias in self.aliases)
        return self.is_named(name) or self.adapter(name) is not None or is_alias

    def adapter(self, name: str | None) -> str | None:
        """The adapter of this name, perhaps with the tag `latest`; None if there is none."""
        return next((each for each in self.adapters if name is not None and tagged(each) == tagged(name)), None)


class Models(Section):
    """Several models at one address, each loaded when a request names it. `model` has what they share."""

    paths: tuple[str | dict[str, Any], ...] = Field(
        (),
        description="Models in the forms of model.path, folders that hold several, or mappings of the sections in which a "
        "model differs (model, draft_model, speculation); an empty list serves model.path alone.",
    )
    idle_seconds: float | None = Field(
        600.0, gt=0, description="Idle time after which a model is unloaded; null keeps it until others need room."
    )


def expand_list(value: Any) -> Any:
    """A list of paths as the section that it is short for."""
    return {"paths": value} if isinstance(value, list | tuple) else value


class DraftModel(Section):
    """The draft model: a smaller model with the target's tokenizer, or a head that reads the target's hidden states."""

    path: ModelPath | None = Field(
        None,
        description="Draft model, in the forms of model.path, or a draft head; owner/name@revision pins a Hugging Face id, and "
        "mtp is the multi-token prediction of the target's own checkpoint or file. null uses none.",
    )
    quantize: Quantize = Field("none", description="See model.quantize; a head is not quantised.")
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="auto, cpu, cuda or cuda:N, for example a second GPU."
    )

    @property
    def place(self) -> tuple[str | None, str]:
        """The path without a revision, and the revision."""
        if self.path is None or Path(self.path).expanduser().exists():
            return self.path, DEFAULT_REVISION
        path, _, revision = self.path.partition("@")
        return path, revision or DEFAULT_REVISION
