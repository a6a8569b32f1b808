"""`outrider bench block-head`: trains a small block head (DSpark's kind) for a model, on a CPU.

First the model answers prompts greedily, and its hidden states are kept. Then the head learns to draft blocks of these answers.
Both parts save their progress in the head's folder, and go on from there. Some prompts are held out: their answers only tell
how many tokens of a block the model would accept.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from bench.plan import BenchError, read_prompts
from outrider.drafters.interface import Ints
from outrider.drafters.none import NoDrafter
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.heads.blocks import BlockHead, new_block_head
from outrider.verify.heads.loading import with_hidden_states
from outrider.verify.heads.model import Target
from outrider.verify.model import backend
from outrider.verify.model.attention.interface import Layer
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.round import run_round
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Step, Stream
from outrider.verify.tokenizer import load_tokenizer
from outrider.verify.verifier import Verifier

# Answers that are decoded at once, and saved together.
TOGETHER = 8
# A text's tokens before its answer that the head reads in training, and the anchors of a training step.
CONTEXT_TOKENS, ANCHORS = 256, 96
RATE, WARM_UP, SAVE_SECONDS = 2e-3, 30, 60.0
# The weight of a block's later positions in the loss falls by e in this many.
FADE = 4.0
# The head's layers, the tokens that it can draft (those most frequent in the answers), and the rank of its Markov matrix.
LAYERS, VOCABULARY, RANK = 1, 8192, 64
# How strongly attention heads begin to look back, and in how many pairs of fast rotation.
LOOK, SHARP = 2.5, 4


@dataclass(frozen=True)
class Recipe:
    """What is trained, and on what."""

    model: str
    prompts: Sequence[Path]
    out: Path  # the head's folder
    every: int  # each prompt whose number this divides is held out
    max_tokens: int  # of an answer
    epochs: int
    block: int  # tokens of a draft
    threads: int


class Text(NamedTuple):
    """The end of a prompt with its answer."""

    tokens: torch.Tensor  # int64 [T]
    states: torch.Tensor  # [T - 1, W]; the target's
    answer: int  # where the answer begins
    is_held_out: bool


class BlockTraining:
    """The attention of many blocks of a text: each row reads the context before its block's anchor, and its block.

    Implements `outrider.verify.model.attention.interface.Attention`.
    """

    def __init__(self, context: Sequence[tuple[torch.Tensor, torch.Tensor]], anchors: torch.Tensor, rows: int) -> None:
        """`context` has each layer's keys and values [1, kv_heads, T, head_dim]."""
        self._context = context
        block = torch.arange(len(anchors)).repeat_interleave(rows)
        before = torch.arange(context[0][0].shape[2]) < anchors[block][:, None]
        self._mask = torch.cat([before, block == block[:, None]], 1)

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        keys, values = (
            torch.cat(each, 1) for each in zip((c[0] for c in self._context[layer.index]), (key, value), strict=True)
        )
        given = (query[None], keys[None], values[None])
        return scaled_dot_product_attention(*given, attn_mask=self._mask, scale=layer.scaling, enable_gqa=True)[0]


def run(recipe: Recipe) -> None:
    """Trains the head. Raises BenchError and ModelError."""
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(0)
    target = with_hidden_states(backend.load(LoadOptions(recipe.model, device="cpu")), recipe.model)
    depth = cast(int, target.depth)
    layers = (2, depth // 2, depth - 3)
    target.tap_hidden(layers)
    target.threads = recipe.threads
    target.start(target.context_tokens)
    recipe.out.mkdir(parents=True, exist_ok=True)
    train(recipe, target, collect(recipe, target), layers)


def collect(recipe: Recipe, target: Target) -> list[Text]:
    """The model's answers to the prompts, with its hidden states."""
    prompts, texts = [prompt for file in recipe.prompts for prompt in read_prompts(file)], list[Text]()
    tokenizer, started = load_tokenizer(recipe.model), time.perf_counter()
    for first in range(0, len(prompts), TOGETHER):
        file = recipe.out / f"answers-{first:05}.pt"
        if not file.exists():
            ids = [encode(tokenizer, prompt) for prompt in prompts[first : first + TOGETHER]]
            torch.save(answers(target, ids, recipe.max_tokens), file)
            print(f"{first + len(ids)} of {len(prompts)} answers, {time.perf_counter() - started:.0f} s", flush=True)
        found = torch.load(file, weights_only=True)
        texts += [
            Text(tokens, states, answer, number % recipe.every == 0)
            for number, (tokens, states, answer) in enumerate(found, start=first)
        ]
    return texts


def encode(tokenizer: AnyTokenizer, prompt: str) -> Ints:
    """The ids of a user's message by the model's chat template, or of the prompt as it is without one."""
    if not getattr(tokenizer, "chat_template", None):
        return np.array(tokenizer.encode(prompt), np.int32)
    messages = [{"role": "user", "content": prompt}]
    return np.array(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"], np.int32)


def answers(target: Target, prompts: Sequence[Ints], max_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Each prompt's end with its answer, the states, and where the answer begins."""
    options = DecodeOptions(SamplingParams(temperature=0), max_tokens, target.stop_tokens)
    streams = [Stream(Verifier(target, target.new_cache()), NoDrafter(), prompt, options) for prompt in prompts]
    running = streams
    while running:
        outcomes = run_round(running)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        running = [s for s, o in zip(running, outcomes, strict=True) if not isinstance(o, Step) or o.finish is None]
    found = []
    for stream, prompt in zip(streams, prompts, strict=True):
        tokens, hidden = stream.verifier.sequence.tokens, stream.verifier.cache.hidden
        assert hidden is not None
        first = max(0, len(prompt) - CONTEXT_TOKENS, hidden.first)
        states = hidden.read(first, len(tokens) - 1).to(torch.float16, copy=True)
        found.append((torch.from_numpy(tokens[first:].astype(np.int64)), states, len(prompt) - first))
        stream.close()
    return found


def train(recipe: Recipe, target: Target, texts: Sequence[Text], layers: tuple[int, ...]) -> None:
    """Trains on the texts, and saves the head now and then."""
    learned, held_out = ([text for text in texts if text.is_held_out == held] for held in (False, True))
    if not learned:
        raise BenchError("All prompts are held out; give at least two.")
    counts = torch.bincount(torch.cat([text.tokens[text.answer :] for text in learned]), minlength=target.vocabulary)
    known = counts.argsort(descending=True, stable=True)[: min(VOCABULARY, target.vocabulary - 1)].sort().values
    config, head = new_head(recipe, target, layers, known)
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, (0.9, 0.95), weight_decay=0.01)
    total, step, saved = recipe.epochs * len(learned), 0, recipe.out / "training.pt"
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda at: min((at + 1) / WARM_UP, 0.05 + 0.95 * (1 + math.cos(math.pi * min(1.0, at / total))) / 2)
    )
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        step = state["step"]
    started, losses, last = time.perf_counter(), list[float](), time.perf_counter()
    while step < total:
        order = torch.randperm(len(learned), generator=torch.Generator().manual_seed(step // len(learned)))
        for number in order[step % len(learned) :].tolist():
            optimizer.zero_grad()
            loss, _ = judged(recipe, target, head, learned[number], known)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            losses.append(float(loss.detach()))
            if time.perf_counter() - last > SAVE_SECONDS or step == total:
                last = time.perf_counter()
                with torch.no_grad():
                    accepted = torch.cat([judged(recipe, target, head, text, known)[1] for text in held_out]).mean()
                state = {"head": head.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"schedule": schedule.state_dict(), "step": step}, saved)
                save(recipe.out, config, head)
                print(
                    f"{step} of {total} texts, loss {np.mean(losses):.3f}, {accepted:.2f} tokens of a block accepted in"
                    f" held-out answers, {last - started:.0f} s",
                    flush=True,
                )
                losses.clear()


def new_head(recipe: Recipe, target: Target, layers: tuple[int, ...], known: torch.Tensor) -> tuple[dict[str, Any], BlockHead]:
    """A head with random weights that drafts the tokens `known`, and its config.json in the layout of speculators."""
    heads = max(1, target.hidden // 64)
    inner = {
        "model_type": "qwen3",
        "vocab_size": target.vocabulary,
        "hidden_size": target.hidden,
        "intermediate_size": 2 * target.hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "attention_bias": True,
        "num_key_value_heads": next(count for count in (3, 4, 2, 1) if heads % count == 0),
        "head_dim": 64,
        "max_position_embeddings": target.context_tokens,
    }
    config = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": inner,
        "draft_vocab_size": len(known),
        "block_size": recipe.block,
        "aux_hidden_state_layer_ids": layers,
        "mask_token_id": 0,
        "markov_rank": RANK,
        "enable_confidence_head": False,
    }
    head = new_block_head({**config, **inner}, cast(int, target.depth), target.vocabulary, True, str(recipe.out))
    for parameter in head.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    torch.nn.init.constant_(head.norm.weight, 0.3)  # the first logits are small
    embeddings = target.embed_tokens(torch.arange(target.vocabulary)[None])[0].float()
    head.markov_head.markov_w1.weight.data = torch.nn.functional.normalize(embeddings) @ torch.randn(target.hidden, RANK)
    torch.nn.init.zeros_(head.markov_head.markov_w2.weight)
    for layer in head.layers:
        look_back(layer.self_attn, cast(torch.Tensor, head.rotary.inv_freq), recipe.block)
    head.d2t = known - torch.arange(len(known))
    rows = target.lm_head(torch.eye(target.hidden, dtype=target.dtype))
    head.lm_head.weight.data = rows[:, known].T.float().contiguous()
    head.lm_head.requires_grad_(False)
    return config, head


def look_back(attention: Any, frequencies: torch.Tensor, block: int) -> None:
    """Lets each attention head begin with one of the last `block` positions, which random weights would be slow to find."""
    queries = torch.zeros(len(attention.q_proj.bias) // 64, 64)
    angles = (1 + torch.arange(len(queries)) % block)[:, None] * frequencies[:SHARP]
    queries[:, :SHARP], queries[:, 32 : 32 + SHARP] = LOOK * angles.cos(), -LOOK * angles.sin()
    keys = torch.zeros(len(attention.k_proj.bias) // 64, 64)
    keys[:, :SHARP] = LOOK
    for linear, bias in ((attention.q_proj, queries), (attention.k_proj, keys)):
        linear.bias.data = bias.flatten()
    for linear in (attention.v_proj, attention.o_proj):
        torch.nn.init.zeros_(linear.bias)


def judged(
    recipe: Recipe, target: Target, head: BlockHead, text: Text, known: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss over blocks of the answer, and how many tokens of each block are accepted, [A]."""
    rows, last = recipe.block, len(text.tokens) - recipe.block
    anchors = text.answer - 1 + torch.randperm(max(1, last - text.answer + 1))[:ANCHORS].sort().values
    places = anchors[:, None] + torch.arange(rows)  # [A, rows]
    fused = head.fuse(text.states[None].float())
    context = list(head.context(fused, torch.arange(len(text.states))[None]))
    noise = torch.zeros_like(places)
    noise[:, 0] = text.tokens[anchors]
    attention = BlockTraining(context, anchors, rows)
    embedded = target.embed_tokens(noise.view(1, -1)).float()
    states = head.advance(embedded, fused, places.view(1, -1), attention=attention, attention_mask=None)[0]
    before, right = text.tokens[places].view(-1), text.tokens[(places + 1).clamp(max=len(text.tokens) - 1)].view(-1)
    added, _ = head.markov_head.step(before, states, states[:, :0])
    logits = head.logits(states[None], head.lm_head)[0] + added
    label = torch.searchsorted(known, right).clamp(max=len(known) - 1)
    can_draft = known[label] == right
    losses = cross_entropy(logits, label, reduction="none") * can_draft
    weights = torch.exp(-torch.arange(rows) / FADE).repeat(len(anchors))
    is_right = ((logits.argmax(-1) == label) & can_draft).view(-1, rows)
    return (losses * weights).sum() / (weights * can_draft).sum().clamp(min=1), is_right.cumprod(1).sum(1).float()


def save(folder: Path, config: dict[str, Any], head: BlockHead) -> None:
    weights = {
        name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for name, tensor in head.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors.new", {"format": "pt"})
    (folder / "model.safetensors.new").replace(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))
