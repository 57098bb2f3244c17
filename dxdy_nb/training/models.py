"""Small models, plain ``nn.Module``: they know nothing of devices, precision or ranks."""

import torch
from torch import Tensor, nn

from dxdy_nb.errors import DxdyError, suggestion


class CNN(nn.Module):
    """Two convolutions and two linear layers for 8×8 pictures.

    Examples
    --------
    >>> CNN()(torch.zeros(4, 1, 8, 8)).shape
    torch.Size([4, 10])
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, kernel_size=3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, 1, 8, 8)
        x = torch.relu(self.conv1(x))  # (B, 16, 8, 8)
        x = torch.relu(self.conv2(x))  # (B, 32, 8, 8)
        x = nn.functional.max_pool2d(x, 2)  # (B, 32, 4, 4)
        x = torch.relu(self.fc1(x.flatten(1)))  # (B, 64)
        return self.fc2(x)  # (B, classes): logits


class MLP(nn.Module):
    """Two hidden layers for inputs of any shape, which are flattened."""

    def __init__(self, features: int, classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, ...)
        x = torch.relu(self.fc1(x.flatten(1)))  # (B, hidden)
        x = torch.relu(self.fc2(x))
        return self.fc3(x)  # (B, classes): logits


class GRU(nn.Module):
    """An embedding, a gated recurrent unit, and a linear layer on its last state."""

    def __init__(self, symbols: int, classes: int, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, 16)
        self.gru = nn.GRU(16, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:  # (B, T) token ids
        _, last = self.gru(self.embedding(x))  # (1, B, hidden)
        return self.head(last[0])  # (B, classes): logits


def build(name: str, sample: Tensor, classes: int) -> nn.Module:
    """Return a model by name that fits inputs like ``sample`` (without the batch dimension).

    Raises
    ------
    DxdyError
        An unknown name.
    """
    makers = {
        "cnn": lambda: CNN(classes),
        "mlp": lambda: MLP(sample.numel(), classes),
        "gru": lambda: GRU(classes, classes),
    }
    if name not in makers:
        raise DxdyError(f"no model is called {name!r}.{suggestion(name, makers)}")
    return makers[name]()


def initialise(model: nn.Module, init: str) -> None:
    """Redraw all weights: ``xavier`` or ``kaiming`` (normal), and biases zero; ``default`` leaves torch's own.

    Sources: Glorot and Bengio 2010; He et al. 2015.
    """
    if init == "default":
        return
    for parameter in model.parameters():
        if parameter.dim() < 2:
            nn.init.zeros_(parameter)
        elif init == "xavier":
            nn.init.xavier_normal_(parameter)
        else:
            nn.init.kaiming_normal_(parameter, nonlinearity="relu")
