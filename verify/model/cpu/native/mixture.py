"""Packs the experts of a layer, and what chooses among them."""

from __future__ import annotations

import ctypes

import numpy as np

from outrider.verify.model.architecture.description import Mixture
from outrider.verify.model.cpu.native import structures
from outrider.verify.model.cpu.native.packing import Packer, Size
from outrider.verify.model.experts import expert_name

# Names in files.
ROUTER, ROUTER_SCALE, ROUTER_BIAS, SHARED_GATE = "ffn_gate_inp", "ffn_gate_inp.scale", "exp_probs_b.bias", "ffn_gate_inp_shexp"
EXPERT_SCALES = "ffn_down_exps.scale"
# Of a mixture beside a dense part.
NORMS = {"norm": "pre_ffw_norm_2", "post_norm": "post_ffw_norm_2", "shared_post_norm": "post_ffw_norm_1"}
NAMES = (ROUTER, SHARED_GATE, *NORMS.values(), *(name.rpartition(".")[0] for name in (ROUTER_BIAS, EXPERT_SCALES)))


def pack_mixture(packer: Packer, number: int, known: Mixture) -> structures.Mixture:
    """The experts of a layer. Raises ModelError."""
    place, hidden = f"blk.{number}.", packer.architecture.hidden
    counted, packer.size = packer.size, Size()  # a step reads those that it uses
    experts = [each for expert in range(known.experts) for each in pack_expert(packer, number, expert)]
    counted.nbytes += packer.size.nbytes * known.used // known.experts
    counted.weights += packer.size.weights * known.used // known.experts
    packer.size = counted
    array = (structures.Linear * len(experts))(*experts)
    norms = {name: packer.norm(place + stored, hidden) for name, stored in NORMS.items()}
    if place + ROUTER_SCALE in packer.tensors:
        norms["router_norm"] = packer.plain_norm(packer.floats(place + ROUTER_SCALE, hidden) * np.float32(hidden**-0.5))
    mixture = structures.Mixture(
        **norms,
        scales=packer.vector(place + EXPERT_SCALES, known.experts),
        router=packer.router(place + ROUTER, known.experts),
        bias=packer.vector(place + ROUTER_BIAS, known.experts),
        experts=ctypes.cast(array, ctypes.POINTER(structures.Linear)),
        shared_gate=packer.router(place + SHARED_GATE, 1) if packer.has(place + SHARED_GATE) else structures.Linear(),
        count=known.experts,
        used=known.used,
        scores=known.scores.value,
        normalized=known.normalizes,
        groups=known.groups,
        used_groups=known.used_groups,
        summed=known.summed,
        scale=known.scale,
    )
    packer.kept += [array, mixture]
    return mixture


def pack_expert(packer: Packer, layer: int, number: int) -> list[structures.Linear]:
    """Gate, up and down. Raises ModelError."""
    hidden = packer.architecture.hidden
    gate, up, down = (expert_name(layer, part, number).removesuffix(".weight") for part in ("gate", "up", "down"))
    inner = packer.tensors[f"{down}.weight"].shape[1]
    first = packer.linear(gate, (inner, hidden)) if packer.has(gate) else structures.Linear()
    return [first, packer.linear(up, (inner, hidden)), packer.linear(down, (hidden, inner))]
