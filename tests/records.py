"""Records with known numbers, for what reads records."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

COLUMNS = ("mean", "max", "min", "norm", "nonzero", "nonfinite", "update_ratio")


@dataclass
class Made:
    """What a watch looks like to a reader; a slice of it holds a part of the steps."""

    steps: pd.DataFrame
    gradients: pd.DataFrame
    sizes: dict[str, int]

    def __getitem__(self, part: slice) -> "Made":
        steps = self.steps[part]
        return Made(steps, self.gradients.loc[steps.index], self.sizes)


def made(count: int, names: list[str]) -> Made:
    """A falling loss, norms that fall from layer to layer, a ratio of 1e-3 at every tenth step; 10 ms a step."""
    step = np.arange(count)
    steps = pd.DataFrame(
        {
            "loss": 2.0 / (1 + step / 10),
            "lr": 0.1,
            "grad_norm": 1.0 + step % 7,
            "effective_batch": 32,
            "step_time": 0.010,
            "data_time": 0.002,
            "forward_time": 0.003,
            "backward_time": 0.004,
            "update_time": 0.0005,
            "memory": 1e9,
            "skipped": False,
            "bad_samples": [[] for _ in step],
        },
        index=pd.Index(step, name="step"),
    )
    index = pd.MultiIndex.from_product([step, names], names=["step", "parameter"])
    gradients = pd.DataFrame(0.0, index=index, columns=list(COLUMNS))
    gradients["norm"] = (10.0 ** -np.arange(len(names)) * (1 + step[:, None] % 5)).ravel()
    gradients["update_ratio"] = np.where(step[:, None] % 10 == 0, 1e-3, np.full((count, len(names)), np.nan)).ravel()
    return Made(steps, gradients, {name: 100 * (place + 1) for place, name in enumerate(names)})
