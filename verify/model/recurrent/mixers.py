"""How unmodified transformers models call our recurrences: their layers' own forwards, with the recurrent functions replaced.

transformers' recurrent layers project their inputs, call a short convolution and a scan by the names of module-level functions,
and project the result. A layer is recognised by the names that its forward calls, whatever the architecture. torch.compile
traces all of it, and what it makes of one layer serves the others: layers differ by a number, which says whose state it is.
"""

from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from transformers.activations import ACT2FN

from outrider.verify.errors import ModelError
from outrider.verify.model.kwarg_injector import NotPassedOn, own_forward
from outrider.verify.model.recurrent.rows import Recurrence, Scan

# Names of transformers' functions whose callers keep a state.
STATES = {"get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state"}


class Mixer:
    """Replaces the forward of the recurrent layers of one class, and the functions that they call, in turns."""

    def __init__(self, forward: FunctionType, names: set[str]) -> None:
        """`forward` is that of the class; `names` are those of the functions that it calls."""
        self._originals = {name: forward.__globals__[name] for name in names}
        scope = forward.__globals__ | {name: getattr(self, REPLACEMENTS[name]) for name in names}
        del scope["__name__"]  # or torch.compile would take the functions from the module of this name
        self._forward = FunctionType(forward.__code__, scope, forward.__name__, forward.__defaults__, forward.__closure__)
        self._forward.__kwdefaults__ = forward.__kwdefaults__
        self._called = self._caller()
        # Of the layer that is running.
        self._recurrence: Recurrence | None = None
        self._layer_number = 0

    def replace(self, module: Any, number: int) -> None:
        """Replaces the forward of a layer by a method, whose function torch.compile finds to be the same in all layers."""
        module.recurrent_layer, module.forward = number, MethodType(self._called, module)

    def _caller(self) -> Callable[..., Any]:
        """The forward of a layer. Raises ValueError if the model does not pass our keyword arguments."""

        def forward(
            module: Any,
            *inputs: Any,
            recurrence: Recurrence | None = None,
            attention: Any = None,
            positions: Any = None,
            **others: Any,
        ) -> Any:
            if recurrence is None:
                raise NotPassedOn("recurrent")
            self._recurrence, self._layer_number = recurrence, module.recurrent_layer
            return self._forward(module, *inputs, **others)

        return forward

    @property
    def _current(self) -> Recurrence:
        assert self._recurrence is not None
        return self._recurrence

    def convolution(
        self,
        hidden_states: torch.Tensor,  # [1, channels, N]
        weight: torch.Tensor,  # [channels, window + 1]
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Replaces `causal_conv1d_fn`."""
        out = self._current.convolve(self._layer_number, hidden_states[0].t(), weight, bias).to(weight.dtype)
        if activation in ("silu", "swish"):
            out = torch.nn.functional.silu(out)
        elif activation is not None:
            out = ACT2FN[activation](out)
        return out.to(hidden_states.dtype).t()[None]

    def delta_rule(
        self,
        query: torch.Tensor,  # [1, N, key_heads, key_dim]
        key: torch.Tensor,
        value: torch.Tensor,  # [1, N, H, value_dim]
        g: torch.Tensor,  # [1, N, H], or [1, N, H, key_dim]
        beta: torch.Tensor,  # [1, N, H]
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """Replaces `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`."""

        def chunked(place: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            parts = (each[:, place] for each in (query, key, value))
            options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "output_final_state": True}
            out, after = self._scan(*parts, g=g[:, place], beta=beta[:, place], initial_state=state[None], **options)
            return out[0], after[0]

        queries, keys = query[0].float(), key[0].float()
        if use_qk_l2norm_in_kernel:  # as transformers does
            queries, keys = normed(queries), normed(keys)
        repeats, scaling = int(value.shape[2]) // int(key.shape[2]), key.shape[-1] ** -0.5
        decays = g[0].float() if g.dim() == 4 else g[0].float()[..., None]
        read = by_head(queries * scaling, repeats), by_head(keys, repeats)
        rows = Scan(*read, by_head(value[0].float()), by_head(decays), beta[0].float().t())
        return self._current.scan(self._layer_number, rows, chunked).transpose(0, 1).to(value.dtype)[None], None

    def state_space(
        self,
        hidden_states: torch.Tensor,  # [1, N, H, value_dim]
        dt: torch.Tensor,  # [1, N, H]
        A: torch.Tensor,  # [H]
        B: torch.Tensor,  # [1, N, groups, key_dim]
        C: torch.Tensor,
        chunk_size: int,
        D: torch.Tensor | None = None,  # [H]
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> torch.Tensor:
        """Replaces `mamba2_chunk_scan` (SSD; Dao and Gu, arXiv 2405.21060)."""

        def chunked(place: slice, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, steps, b, c = (each[:, place] for each in (hidden_states, dt, B, C))
            options = {"dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
            before = state.transpose(1, 2)[None]
            out, after = self._scan(x, steps, A, b, c, chunk_size, initial_states=before, return_final_states=True, **options)
            return out[0], after[0].transpose(1, 2)

        steps = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
        steps = torch.nn.functional.softplus(steps) if dt_softplus else steps
        steps = steps.clamp(*dt_limit).float()
        repeats = int(hidden_states.shape[2]) // int(B.shape[2])
        values = by_head(hidden_states[0].float() * steps[..., None])
        decays = (steps * A.float()).t()[..., None]
        rows = Scan(by_head(C[0].float(), repeats), by_head(B[0].float(), repeats), values, decays, None)
        out = self._current.scan(self._layer_number, rows, chunked).transpose(0, 1)
        return (out if D is None else out + skip(D, hidden_states)).contiguous()[None]

    def _scan(self, *inputs: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's own chunked form."""
        original = next(each for name, each in self._originals.items() if name != CONVOLUTION)
        found: tuple[torch.Tensor, torch.Tensor] = original(*inputs, **options)
        return found


CONVOLUTION = "causal_conv1d_fn"
# The methods of Mixer, by the names of the functions of transformers that they replace.
REPLACEMENTS = {
    CONVOLUTION: "convolution",
    "torch_chunk_gated_delta_rule": "delta_rule",
    "chunk_kimi_delta_attention": "delta_rule",
    "mamba2_chunk_scan": "state_space",
}


def normed(rows: torch.Tensor) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + 1e-6)


def by_head(rows: torch.Tensor, repeats: int = 1) -> torch.Tensor:
    """[N, heads, width] to [heads * repeats, N, width]."""
    if repeats != 1:
        rows = rows.unsqueeze(2).expand(-1, -1, repeats, -1).flatten(1, 2)
    return rows.transpose(0, 1)


def skip(weights: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """The inputs [1, N, H, value_dim] that bypass the state, [N, H, value_dim]; `weights` is [H]."""
    return weights[..., None] * inputs[0].float()


def stateful(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, FunctionType, set[str]]]:
    """The layers that keep a state, their forwards, and the functions that these call and that we replace."""
    for module in model.modules():
        forward = own_forward(module)
        if forward is not None and STATES & set(forward.__code__.co_names):
            yield module, forward, REPLACEMENTS.keys() & set(forward.__code__.co_names)


def swap_in(model: torch.nn.Module) -> bool:
    """Replaces the forwards of the model's recurrent layers; returns whether there are any. Raises ModelError."""
    layers = list(stateful(model))
    for module, _, names in layers:
        if not names or not is_complete(module, names):
            raise ModelError(
                f"This model cannot be served: its {type(module).__name__} layers keep a state of a kind that is not supported;"
                " serve another model."
            )
    mixers = {type(module): Mixer(forward, names) for module, forward, names in layers}
    for number, (module, _, _) in enumerate(layers):
        mixers[type(module)].replace(module, number)
    return bool(layers)


def is_complete(module: torch.nn.Module, names: set[str]) -> bool:
    """Whether the replaced functions cover the whole state of a layer: a scan if it has one."""
    forward = own_forward(module)
    assert forward is not None
    return "get_recurrent_state" not in forward.__code__.co_names or bool(names - {CONVOLUTION})
