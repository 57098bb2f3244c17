"""Muon for the matrices of hidden layers and AdamW for everything else, as one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dxdy_nb.errors import DxdyError


class MuonAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` on the 2-D weights of hidden layers, ``torch.optim.AdamW`` on all other parameters.

    Embeddings and the last matrix of a model (its head) are no hidden layers; convolutions (4-D) and biases are no
    matrices. Two optimizers that act as one: a scaler leaves out both steps or none, and a schedule or a checkpoint
    has one to deal with. Muon's updates get the length of AdamW's, so that one ``lr`` suits both.

    Sources: Jordan 2024; Liu et al. 2025 (the length of updates).

    Parameters
    ----------
    model : what to train
    lr, weight_decay : of both
    momentum : of Muon

    Raises
    ------
    DxdyError
        No hidden layer has a 2-D weight.

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> [len(group["params"]) for group in MuonAdamW(net, lr=0.01).param_groups]
    [1, 3]
    """

    def __init__(self, model: nn.Module, lr: float, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        matrices = [p for p in model.parameters() if p.dim() == 2 and id(p) not in embeddings]
        hidden, chosen = matrices[:-1], set(map(id, matrices[:-1]))
        if not hidden:
            shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in model.named_parameters())
            raise DxdyError(
                "optimizer: 'muon' moves the 2-D weights of hidden layers, not embeddings and not the head, and this "
                f"model has none: {shapes}. Take 'adamw', or a model with a hidden linear layer."
            )
        others = [p for p in model.parameters() if id(p) not in chosen]
        adjust = "match_rms_adamw"
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(hidden, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn=adjust),
            torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step of both, after the closure if there is one, and return what that returned."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.state, part.param_groups = self.state, [group]  # which a loaded state dict replaces
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}  # torch's own leaves out what it does not know
