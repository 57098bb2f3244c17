import math

import pytest
import torch

from dxdy_nb.diagnosis.reading import bounds

X = torch.randn(4, 2, requires_grad=True)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (2 * torch.tanh(X) / 4, (-0.5, 0.5)),
        (torch.sigmoid(X).reshape(2, 4), (0, 1)),
        (-3.0 * torch.relu(X), (-math.inf, 0)),
        (X.clamp(min=1), (1, math.inf)),
        (torch.nn.functional.hardtanh(X, -2, 5)[0], (-2, 5)),
        (X * 2, (-math.inf, math.inf)),
        (torch.tanh(X) + 1, (-math.inf, math.inf)),  # what is added is not in the graph
        (torch.tanh(X) * torch.tensor([1.0, 9.0]), (-math.inf, math.inf)),  # a bound for each column: not one for all
        (X.detach(), (-math.inf, math.inf)),
    ],
)
def test_bounds_are_those_of_the_last_operation(output, expected):
    assert bounds(output) == expected
