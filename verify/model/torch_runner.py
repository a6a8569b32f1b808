"""Forwards of an unmodified transformers model over our KV cache, by the fastest backend that it supports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedModel

from outrider.verify.errors import ModelError, first_sentence
from outrider.verify.findings import processor
from outrider.verify.model.attention.interface import Attention, ShapeProbe, number_layers
from outrider.verify.model.attention.torch_attention import JointAttention, PictureAttention, TorchAttention
from outrider.verify.model.batch import ForwardBatch, Segment, grouped, keep_hidden, kept_rows, positions_of, tokens_of
from outrider.verify.model.cache.codec import STORED
from outrider.verify.model.cache.kv_cache import MARGIN_POSITIONS
from outrider.verify.model.cache.shape import CacheShape, KVDtype, LayerShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.cpu.native.layers import pack_layers
from outrider.verify.model.gpu.devices import Crossings
from outrider.verify.model.gpu.experts import touched_experts
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool, pages_for, unplanned_pages
from outrider.verify.model.gpu.projections import use_kernels
from outrider.verify.model.gpu.split_linear import INSTEAD, SplitLinear
from outrider.verify.model.gpu.text_work import INVARIANT_ROWS, ROWS, depth_left
from outrider.verify.model.hidden_states import HiddenTap
from outrider.verify.model.kwarg_injector import KwargInjector, NotPassedOn, is_receiver
from outrider.verify.model.load_options import Compile
from outrider.verify.model.memory import keep_freed_memory
from outrider.verify.model.pictures import reader_of
from outrider.verify.model.recurrent.mixers import swap_in
from outrider.verify.model.recurrent.rows import Recurrence, StateProbe, recurrence_of
from outrider.verify.model.recurrent.states import ROWS as STEP_ROWS
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.sizes import cache_dtype, context_limit, end_tokens, packed_layers, weight_size

if TYPE_CHECKING:
    from outrider.verify.model.gpu.graphs import GraphedForward

# The most rows of a forward without graphs, if they belong to several streams.
MOST_ROWS = 1024


class TorchRunner(ModelRunner):
    """A model of transformers, computed by our kernels where they can, and else by PyTorch."""

    fuses = True  # whether graphs are of `outrider.verify.model.gpu.decoder` where that computes the model
    is_fused = False  # whether they are
    tiles_file: Path | None = None  # of the sizes of tiles that earlier starts have found on a GPU
    max_rows = MOST_ROWS

    def __init__(
        self,
        model: PreTrainedModel,
        context_tokens: int | None = None,
        pack: bool = False,
        compile: Compile = "auto",
        started: bool = True,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        """Options as in `LoadOptions`. Unless `started`, call `start` before any other method. Raises ModelError."""
        if compile == "on" and model.device.type != "cuda":
            raise ModelError("torch.compile is for GPUs.")
        self.model = model.eval()
        if model.device.type != "cpu":
            use_kernels(model)
        dtype = cache_dtype(model)
        if pack:
            pack_layers(model)
        self.weight_bytes, weights = weight_size(model)  # read by each step
        self.held_bytes = self.weight_bytes
        self.weight_bits = round(8 * self.weight_bytes / max(1, weights), 2)  # mean, scales included
        self.device = model.device
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.description, self.library = str(model.config.to_json_string()), f"torch {torch.__version__}"
        self.stop_tokens = end_tokens(model)
        self.model_tokens = context_limit(model)
        self.context_tokens = min(self.model_tokens, context_tokens or self.model_tokens)
        self._compile = compile
        self._is_recurrent = swap_in(self.model)
        self._injector = KwargInjector()
        self._tap: HiddenTap | None = None
        self.pictures = reader_of(model)
        self._crossings = Crossings(model, model.device)
        self._touched = touched_experts(model) if model.device.type != "cpu" else None
        self.experts = None if self._touched is None else self._touched.experts
        self._attention_probe = ShapeProbe()
        self._model_shape = replace(self._probe(self._attention_probe), dtype=dtype, coded=STORED[kv_dtype])
        self.is_split = isinstance(model.get_output_embeddings(), SplitLinear)
        self.cache_shape = self._over_ranks(self._model_shape)
        self._pool: PagePool | None = None
        self.graphs: GraphedForward | None = None  # on a GPU
        if started:
            self.start(self.context_tokens)

    def start(self, context_tokens: int, invariant_rows: Sequence[int] = ()) -> None:
        """See `ModelRunner.start`. On a GPU, `invariant_rows` are numbers of rows in which each row has the same bits."""
        self.context_tokens, self.is_invariant = min(self.model_tokens, context_tokens), bool(invariant_rows)
        keep_freed_memory()
        if self.in_pages and (self._pool is None or len(self._pool) != self._pool_pages()):
            self._pool = None  # frees its memory first
            self._pool = PagePool(self.cache_shape, self._pool_pages())
        self.graphs = None if self._pool is None else self._captured(self._graphed(self._pool, invariant_rows or ROWS))
        self.max_rows = MOST_ROWS if self.graphs is None else self.graphs.max_rows

    def tap_hidden(self, layers: Sequence[int]) -> int:
        """Keeps hidden states in the caches, as `HiddenTap` takes them; returns their width. Call it before `start`."""
        self._tap = HiddenTap(self.model, layers, self._crossings.bring)
        self.cache_shape = replace(self.cache_shape, hidden_width=self._tap.width)
        return self._tap.width

    # What a draft head uses of its target.

    @property
    def hidden(self) -> int:
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def depth(self) -> int | None:
        """The number of layers; None if the model has no list of them."""
        has_layers = hasattr(self.model.get_decoder(), "layers")
        return int(self.model.config.get_text_config().num_hidden_layers) if has_layers else None

    @property
    def dtype(self) -> torch.dtype:
        """The data type of a head's weights."""
        return cast(torch.dtype, self.model.dtype)

    @property
    def embed_tokens(self) -> torch.nn.Module:
        return cast(torch.nn.Module, self.model.get_input_embeddings())

    @property
    def lm_head(self) -> torch.nn.Module:
        return cast(torch.nn.Module, self.model.get_output_embeddings())

    @property
    def in_pages(self) -> bool:  # type: ignore[override]
        """Whether caches are pages of a pool, with kernels over them: on a GPU."""
        return bool(self.device.type == "cuda")

    @property
    def backends(self) -> str:
        packed = sorted({type(layer).__name__ for layer in packed_layers(self.model)})
        how = ", split" if self.is_split else ""
        return f"packed {packed}, {self.weight_bytes} bytes, compiled {self._compile}, {self.kernels}{how}"

    @property
    def machine(self) -> tuple[str, ...]:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else processor()
        return name, str(self.threads or torch.get_num_threads())

    def use_threads(self, count: int) -> None:
        """See `ModelRunner`. Call it before `start`: a machine's kernels may sum differently with other threads."""
        self.threads = count
        torch.set_num_threads(count)

    @property
    def kernels(self) -> str:  # type: ignore[override]
        """The kernels that were chosen for this CPU; empty on a GPU."""
        if self.device.type != "cpu":
            return ""
        layers = sorted({layer.kernel for layer in packed_layers(self.model)}) or ["PyTorch"]
        return f"linear layers: {', '.join(layers)}"

    def draft_depth(self, length: int) -> int:
        return depth_left(length) if self.is_invariant else super().draft_depth(length)

    @property
    def touched(self) -> float:  # type: ignore[override]
        return 0.0 if self._touched is None else self._touched.mean

    def run_all(self, alike: Mapping[int, int]) -> None:
        """Runs a forward of each number of rows, on empty caches.

        `alike` repeats the cache's layers: by a layer's number in the model, how many the cache has of its shape.
        """
        from outrider.verify.model.gpu.tiles import tuning_of

        numbers, layers, first = self._attention_probe.numbers, list[LayerShape](), dict[int, int]()
        for index, number in numbers.items():
            if number not in first:  # else it shares another one's keys
                first[number] = len(layers)
                layers += [self._model_shape.layers[number]] * (alike.get(index) or 1)
        number_layers(self.model, {index: first[number] for index, number in numbers.items()})
        shape = self._over_ranks(replace(self._model_shape, layers=tuple(layers)))
        graphed = self._graphed(PagePool(shape, 1), INVARIANT_ROWS if shape.recurrent is None else ROWS)
        with tuning_of(self.device).noted():
            graphed.run_all()

    def _over_ranks(self, shape: CacheShape) -> CacheShape:
        """The layout of the caches of a model that may be split."""
        head = self.model.get_output_embeddings()
        return shape.over(head.devices) if isinstance(head, SplitLinear) else shape

    def _graphed(self, pool: PagePool, counts: Sequence[int]) -> GraphedForward:
        """The kernels of a forward of each number of rows."""
        # Triton is only needed on a GPU.
        from outrider.verify.model.gpu.decoder import decoder_of
        from outrider.verify.model.gpu.graphs import GraphedForward

        fused = decoder_of(self.model, self._positions, self._tap, self._crossings) if self.fuses else None
        if self.is_split and fused is None:
            raise ModelError(f"The layers of this model cannot be split over GPUs; {INSTEAD}.")
        self.is_fused, run = fused is not None, fused or partial(self._run, keep=0)
        groups = self._attention_probe.groups
        graphed = GraphedForward(run, pool, self._positions, groups, counts, self._tap, self._crossings)
        graphed.touched, graphed.tiles_file = self._touched, self.tiles_file
        return graphed

    def _captured(self, graphed: GraphedForward) -> GraphedForward:
        """CUDA graphs, or the same kernels launched one by one if the model cannot be captured."""
        from outrider.verify.model.gpu.graphs import can_capture

        if self.device.type == "cuda" and (self.is_fused or can_capture(self.model, self.model)):
            graphed.capture_model(self.model, "off" if self.is_fused else self._compile)
        return graphed

    def _probe(self, probe: ShapeProbe) -> CacheShape:
        """The cache shape, determined by a forward of one token. Raises ModelError."""
        states = StateProbe()
        token = torch.zeros(1, dtype=torch.long, device=self.device)
        try:
            try:
                self._run(token, token, probe, keep=1, recurrence=states)
            except NotPassedOn:
                self._injector = KwargInjector(filter(is_receiver, self.model.modules()), self._crossings.bring)
                self._run(token, token, probe, keep=1, recurrence=states)
            recurrent = states.shape(self.device) if self._is_recurrent else None
        except ValueError as error:
            raise ModelError(f"This model cannot be served: {first_sentence(error)}") from None
        except Exception as error:  # whatever a model of any architecture raises
            raise ModelError(
                "This model cannot be served: its forward fails when it is called with tokens and positions alone"
                f" ({type(error).__name__}: {first_sentence(error)})"
            ) from None
        if not probe.shapes and recurrent is None:
            raise ModelError("This model cannot be served: none of its layers computes attention by transformers' interface.")
        number_layers(self.model, probe.numbers)
        homes = probe.homes if {*probe.homes} - {self.device} else ()
        return CacheShape(probe.layers, self.model.dtype, self.device, recurrent, homes=homes)

    @property
    def _positions(self) -> int:
        return self.context_tokens + MARGIN_POSITIONS

    def _pool_pages(self) -> int:
        """Pages of the pool: as planned, else as it has, but a context at least, else some contexts."""
        if self.pages is not None:
            return self.pages
        if self._pool is not None:
            return max(pages_for(self._positions), len(self._pool))
        return unplanned_pages(self.cache_shape, self._positions)

    @property
    def free_pages(self) -> int | None:
        return None if self._pool is None else self._pool.free

    def new_cache(self) -> TensorCache:
        if self._pool is not None:
            return PagedCache(self._pool, self._positions)
        return TensorCache(self.cache_shape, self._positions)

    def forward_all(self, segments: Sequence[Segment]) -> list[torch.Tensor]:
        """`ModelRunner.forward_all` with as many segments at once as the backend takes."""
        for segment in segments:
            segment.cache.release()
        if self._pool is not None:
            self._pool.reserve([(cast(PagedCache, each.cache), len(each.batch)) for each in segments])
        if any(each.picture for each in segments):
            return [self._read_picture(each) if each.picture else self.forward_all([each])[0].clone() for each in segments]
        apart = [each for each in segments if self._is_apart(each)]
        others = grouped([each for each in segments if each not in apart], self.max_rows)
        groups = [*([each] for each in apart), *others]
        found: dict[int, torch.Tensor] = {}  # by the segment's cache
        for group in groups:
            logits = self._eager(group) if self.graphs is None or group[0] in apart else self.graphs(group)
            parts = logits.split([each.kept for each in group])
            own = parts if len(groups) == 1 else [each.clone() for each in parts]
            found |= zip((id(each.cache) for each in group), own, strict=True)
        return [found[id(each.cache)] for each in segments]

    def _is_apart(self, segment: Segment) -> bool:
        """Whether rows on a GPU are computed outside of the graphs, because they are too many.

        Where rows are invariant, none are: the bits of a prompt's keys and values do not depend on how it was cut.
        """
        if self.graphs is None or self.is_invariant or self.is_split:
            return False
        return len(segment.batch) > min(self.max_rows, STEP_ROWS if self._is_recurrent else self.max_rows)

    def read_alone(self, cache: TensorCache, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of a text's first tokens, int64 [N], at the positions that the model itself gives them; [N, V]."""
        batch = ForwardBatch.chain(tokens)
        if self.is_split:  # into parts of heads, but transformers computes whole ones
            cache = PagedCache(PagePool(self._model_shape, pages_for(len(tokens))), len(tokens))
        segment = Segment(cache, batch)
        cache.reserve(len(batch))
        return self._run(tokens.to(self.device), None, TorchAttention(cache, batch), 0, recurrence_of([segment]))

    def _eager(self, segments: Sequence[Segment]) -> torch.Tensor:
        """The logits of the kept rows, one segment after the other, by a forward without graphs."""
        streams: list[tuple[Attention, int]] = [(TorchAttention(each.cache, each.batch), each.rows) for each in segments]
        joint = streams[0][0] if len(streams) == 1 else JointAttention(streams)
        whole = all(each.logits for each in segments)
        kept = 0 if whole else torch.from_numpy(kept_rows(segments)).to(self.device)
        tokens, positions = (torch.from_numpy(each).to(self.device) for each in (tokens_of(segments), positions_of(segments)))
        logits = self._run(tokens, positions, joint, kept, recurrence_of(segments))
        if self._tap is not None:
            keep_hidden(self._tap.states, segments)
        return logits

    def _read_picture(self, segment: Segment) -> torch.Tensor:
        """The forward of a picture's rows, and of nothing else; logits of the last row."""
        assert segment.picture and self.pictures
        attention = PictureAttention(segment, self.pictures.both_ways)
        rows = segment.picture.rows(segment.cache.length - segment.shift, self.device)
        states, pixels = recurrence_of([segment]), segment.picture.pixels(self.device, self.cache_shape.dtype)
        logits = self._run(*rows, attention, 1, states, pixels)
        if self._tap is not None:
            keep_hidden(self._tap.states, [segment])
        return logits

    @torch.inference_mode()
    def _run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        attention: Attention,
        keep: int | torch.Tensor,
        recurrence: Recurrence | None = None,
        pixels: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The model's forward; logits of the rows `keep`, of the last `keep` rows, or of all rows if it is 0.

        Positions are int64 [N], or [3, N] in a grid; `pixels` are further arguments.
        """
        ours = {"attention": attention} | ({"recurrence": recurrence} if self._is_recurrent else {})
        rows = {"input_ids": tokens[None], "position_ids": None if positions is None else positions[..., None, :]}
        with self._injector.inject(ours, positions) as handed:
            output = self.model(**rows, use_cache=False, logits_to_keep=keep, **(pixels or {}), **handed)
        return cast(torch.Tensor, output.logits[0])
