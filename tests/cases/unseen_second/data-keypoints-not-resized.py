"""Images of any size are resized to 16 x 16 but the key points keep the pixels of the original image.

source: https://github.com/500swapnil/stacked-hourglass/issues/3, https://github.com/NVlabs/PAMTRI/issues/7
stage: data
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SIZE = 16


class Faces(Dataset):
    """One bright spot in an image of 20 to 56 pixels a side; the target is where it is."""

    def __init__(self, n, scale_points):
        self.scale_points = scale_points
        self.items = []
        for side in torch.randint(20, 57, (n,)).tolist():
            point = torch.rand(2) * (side - 1)
            grid = torch.arange(side, dtype=torch.float32)
            spot = (grid[:, None] - point[1]) ** 2 + (grid[None, :] - point[0]) ** 2
            self.items.append((torch.exp(-spot / (side / 8) ** 2)[None], point))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        image, point = self.items[i]
        small = F.interpolate(image[None], (SIZE, SIZE), mode="bilinear", align_corners=False)[0]
        return small, point * SIZE / image.shape[-1] if self.scale_points else point


# measured: root mean square error in the resized image after 200 steps 18.2 pixels against 0.7
def make(bug=True):
    torch.manual_seed(0)
    data = Faces(256, scale_points=not bug)
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIZE * SIZE, 64), nn.ReLU(), nn.Linear(64, 2))
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(data, 32, shuffle=True),
        "dataset": data,
    }


def make_fixed():
    return make(bug=False)
