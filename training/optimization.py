"""The optimizers of a model that is trained, and their state in a checkpoint."""

from __future__ import annotations

from typing import Any

import torch


class Optimization:
    """Muon for the matrices of layers, AdamW for all other parameters."""

    def __init__(self, model: torch.nn.Module, matrices: list[torch.nn.Parameter]) -> None:
        self._model = model
        chosen = {id(parameter) for parameter in matrices}
        others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=0.006, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._base_rates = [group["lr"] for optimizer in self._optimizers for group in optimizer.param_groups]

    def step(self, loss: torch.Tensor, rate: float) -> None:
        """One update at `rate` times the base learning rates."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, base in zip(groups, self._base_rates, strict=True):
            group["lr"] = base * rate
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """What `load` restores."""
        return {"model": self._model.state_dict(), "optimizers": [each.state_dict() for each in self._optimizers]}

    def load(self, state: dict[str, Any]) -> None:
        """Restores the model and the optimizers."""
        self._model.load_state_dict(state["model"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
