"""transformers: `model.generate(..., custom_generate=outrider.engines.transformers.generate)`.

Greedy answers are those of plain `generate`. Samples are drawn with keyed noise (`outrider.drafters.library.keyed`), so a seed
gives the same answer with any drafter. A draft is a tree where the model's attention follows a mask of ancestors, else a chain.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outrider.drafters.interface import EMPTY, DraftTree, Floats, Ints, Source, arrange
from outrider.drafters.library import Keyed, Resources, Session
from outrider.drafters.options import DrafterName

# Attention functions that add a mask of any shape to their scores.
MASKED = ("eager", "sdpa")
# A tree is supported if its logits are this much nearer to those of its path than to those of its rows in a chain.
NEARER = 0.1
# Arguments of `generate` that this one understands, beside those that it takes from the configuration.
KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}

Choose = Callable[[torch.Tensor, torch.Tensor], int]


def generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: DrafterName = "fusion",
    session: Session | None = None,
    nodes: int = 16,
    least: float = 0.1,
    seed: int | None = None,
    stream_to: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decodes as `GenerationMixin._sample` does, with drafts. The arguments after the configuration go to `model.generate`.

    A draft has at most `nodes` nodes, each with a path probability above `least`. A `session` that is passed to several calls
    goes on learning; without one, `drafter` names what drafts. Samples depend on `seed`; without one, on torch's generator.
    `stream_to` takes the place of `streamer`, which transformers does not pass on. Raises ValueError for what it cannot do.
    """
    check(input_ids, generation_config, model_kwargs)
    vocabulary = model.get_input_embeddings().num_embeddings
    session = session or Session(drafter, Resources(vocabulary=vocabulary))
    sampling = keyed(generation_config, seed) if generation_config.do_sample else None
    target = Target(model, model_kwargs["past_key_values"], "logits_to_keep" in model_kwargs)
    choose = chooser(logits_processor, sampling, input_ids.shape[1])
    ids = input_ids.cpu()
    session.begin(ids[0].numpy(), sampling=sampling)
    logits, tree, stopped = target.read(input_ids), EMPTY, False
    while not stopped:
        tokens, stopped = accept(tree, ids, logits, choose, stopping_criteria)
        ids = torch.cat([ids, torch.tensor([tokens])], dim=1)
        if stream_to is not None:
            stream_to.put(ids[0, -len(tokens) :])
        target.commit(tree, tree.follow(np.array(tokens[:-1], np.int32)))
        session.observe(tokens, *likeliest(logits, session.feedback))
        if not stopped:
            room = generation_config.max_length - ids.shape[1] - 1
            if target.takes_trees:
                tree = session.propose(nodes, least, depth=room)
            else:
                tree = session.propose_chain(min(nodes, room), least)
            logits = target.verify(tokens[-1], tree)
    session.end()
    if stream_to is not None:
        stream_to.end()
    answer = ids.to(input_ids.device)
    if not generation_config.return_dict_in_generate:
        return answer
    return GenerateDecoderOnlyOutput(sequences=answer, past_key_values=target.cache)


def check(input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Raises ValueError for a request that cannot be drafted."""
    mask = model_kwargs.get("attention_mask")
    others = sorted(name for name, value in model_kwargs.items() if name not in KNOWN and value is not None)
    problems = {
        "no beams": config.num_beams > 1,
        "one text at a time, without padding": input_ids.shape[0] > 1 or (mask is not None and not bool(mask.all())),
        "one token at least": config.max_length <= input_ids.shape[1],
        "no scores, attentions or hidden states": any(
            (config.output_scores, config.output_logits, config.output_attentions, config.output_hidden_states)
        ),
        "no input but token ids": bool(others) or input_ids.shape[1] == 0,
        "use_cache=True": not isinstance(model_kwargs.get("past_key_values"), Cache) or not model_kwargs["use_cache"],
    }
    for sentence, occurs in problems.items():
        if occurs:
            raise ValueError(f"Outrider's generate takes {sentence}; leave out custom_generate for this request.")


def keyed(config: GenerationConfig, seed: int | None) -> Keyed:
    """How the configuration samples."""
    filters = bool(config.top_k or (config.top_p or 1.0) < 1.0 or config.min_p or config.typical_p not in (None, 1.0))
    seed = int(torch.randint(1 << 32, ())) if seed is None else seed
    return Keyed(config.temperature or 1.0, config.top_k or 0, filters, seed)


def chooser(processor: LogitsProcessorList, sampling: Keyed | None, prompt_tokens: int) -> Choose:
    """A function of a text, int64 [1, T], and the model's logits after it, [V], that returns the target's next token."""

    def choose(text: torch.Tensor, logits: torch.Tensor) -> int:
        scores = processor(text.to(logits.device), logits[None].float())[0]
        if sampling is None:
            return int(scores.argmax())
        return sampling.choose(scores.cpu().numpy(), text.shape[1] - prompt_tokens)

    return choose


class Target:
    """The model and its cache, which holds the text without its last token."""

    def __init__(self, model: PreTrainedModel, cache: Cache, cuts_logits: bool) -> None:
        self.cache = cache
        self.takes_trees = False  # known once the prompt is read
        self._model = model
        self._cuts_logits = cuts_logits  # whether the model computes only the logits that are asked for

    def read(self, prompt: torch.Tensor) -> torch.Tensor:
        """Reads the prompt, int64 [1, P], from where the cache ends; the logits after its last token, [1, V]."""
        logits = self._forward(prompt[:, self.cache.get_seq_length() :], 1)
        if not self.cache.is_croppable:
            raise ValueError("This model's cache cannot take back drafted tokens; leave out custom_generate for it.")
        self.cache.activate_past_recording()
        plain = all(type(layer) is DynamicLayer for layer in self.cache.layers)
        self.takes_trees = plain and takes_trees(weakref.ref(self._model), self._model.config._attn_implementation)
        return logits

    def verify(self, token: int, tree: DraftTree) -> torch.Tensor:
        """The logits after the text's last token and after each node, [N+1, V]."""
        rows = torch.tensor([[token, *tree.tokens.tolist()]], device=self._model.device)
        if not self.takes_trees:
            return self._forward(rows, rows.shape[1])
        return self._forward(rows, rows.shape[1], **tree_inputs(tree, self.cache.get_seq_length(), self._model))

    def commit(self, tree: DraftTree, path: Ints) -> None:
        """Keeps the rows of the accepted nodes, int32 [A], in the order of the path."""
        if not np.array_equal(path, np.arange(len(path))):
            start = self.cache.get_seq_length() - len(tree)
            rows = torch.from_numpy(start + path.astype(np.int64))
            for layer in self.cache.layers:
                for states in (layer.keys, layer.values):
                    states[..., start : start + len(path), :] = states[..., rows.to(states.device), :]
        self.cache.crop(len(path) - len(tree))

    def _forward(self, ids: torch.Tensor, wanted: int, **inputs: Any) -> torch.Tensor:
        """The logits of the last rows, [wanted, V]."""
        if self._cuts_logits:
            inputs["logits_to_keep"] = wanted
        output = self._model(input_ids=ids, past_key_values=self.cache, use_cache=True, **inputs)
        logits: torch.Tensor = output.logits[0, -wanted:]
        return logits


def tree_inputs(tree: DraftTree, known: int, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Positions [1, N+1] and mask [1, 1, N+1, known+N+1] of the root and the nodes of a tree after `known` cached tokens."""
    depths = np.concatenate([[0], tree.depths]).astype(np.int64)
    mask = torch.zeros(1, 1, len(depths), known + len(depths), dtype=model.dtype)
    mask[0, 0, :, known:].masked_fill_(~torch.from_numpy(tree.ancestors), torch.finfo(model.dtype).min)
    return {
        "position_ids": torch.from_numpy(known + depths)[None].to(model.device),
        "attention_mask": mask.to(model.device),
    }


@cache
def takes_trees(model: weakref.ref[PreTrainedModel], attention: str) -> bool:
    """Whether a node's logits are those of its path, tried with two siblings."""
    target = model()
    assert target is not None
    if attention not in MASKED or "position_ids" not in inspect.signature(target.forward).parameters:
        return False
    tokens = torch.arange(3, device=target.device)[None]
    siblings, _ = arrange(tokens=[1, 2], parents=[-1, -1], probability=[1.0, 1.0], source=[Source.NONE] * 2)
    try:
        found = target(input_ids=tokens, use_cache=False, **tree_inputs(siblings, 0, target)).logits[0, 2]
    except (RuntimeError, ValueError, TypeError, IndexError):  # of models that read another kind of mask
        return False
    path, rows = (target(input_ids=ids, use_cache=False).logits[0, -1] for ids in (tokens[:, [0, 2]], tokens))
    return bool((found - path).abs().max() <= NEARER * (rows - path).abs().max())


def accept(
    tree: DraftTree, ids: torch.Tensor, logits: torch.Tensor, choose: Choose, stopping: StoppingCriteriaList
) -> tuple[list[int], bool]:
    """The step's tokens: the accepted path and the target's own token after it. Also whether the answer ends with them."""
    tokens: list[int] = []
    row: int | None = -1
    stopped = False
    while row is not None and not stopped:
        tokens.append(choose(ids, logits[row + 1]))
        ids = torch.cat([ids, torch.tensor([tokens[-1:]])], dim=1)
        stopped = bool(stopping(ids.to(logits.device), None).all())
        row = tree.child(row, tokens[-1])
    return tokens, stopped


def likeliest(logits: torch.Tensor, count: int) -> tuple[Ints, Floats]:
    """The likeliest tokens of each row and their probabilities, int32 and float32 [N+1, count]."""
    top, ids = logits.float().topk(count)
    probabilities = (top - logits.float().logsumexp(-1, keepdim=True)).exp()
    return ids.int().cpu().numpy(), probabilities.cpu().numpy()
