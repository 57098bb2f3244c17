"""Pictures, maps and sound."""

import torch
import torch.nn.functional as F
from nets import ResNet18
from torch import nn

from cases.healthy import healthy
from cases.healthy.data import loader, pictures


def small_net(classes=4, channels=3):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


@healthy
def resnet():
    """BatchNorm mixes samples in training, half of the activations are zero, the residual sum is in place elsewhere."""
    model = ResNet18()
    model.head = nn.Linear(model.head.in_features, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    data = loader(*pictures(size=16), size=32)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": data, "optimizer": optimizer}


@healthy
def resnet_zero_init_residual():
    """The last norm of each block has weight 0, so the convolutions before it get a zero gradient at first."""
    model = ResNet18()
    for name, module in model.named_modules():
        if name.endswith("norm2"):
            nn.init.zeros_(module.weight)
    model.head = nn.Linear(model.head.in_features, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    data = loader(*pictures(size=16), size=32)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1), "loader": data, "optimizer": optimizer}


class Bottleneck(nn.Module):
    def __init__(self, width, inside):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(width, inside, 1, bias=False),
            nn.Conv2d(inside, inside, 3, padding=1, groups=2, bias=False),
            nn.Conv2d(inside, width, 1, bias=False),
        )
        self.na, self.nb, self.nc = nn.BatchNorm2d(inside), nn.BatchNorm2d(inside), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.na(self.a(x)))
        y = self.nc(self.c(self.relu(self.nb(self.b(y)))))
        y += x
        return self.relu(y)


@healthy(fast=True)
def bottlenecks_in_place():
    """One ReLU module is used three times, in place, and the sum is in place too: autograd allows all of it."""
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    model = nn.Sequential(stem, Bottleneck(16, 8), Bottleneck(16, 8), head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*pictures()), "optimizer": optimizer}


class UNet(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.middle = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.GroupNorm(2, 16), nn.SiLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.head = nn.Conv2d(16, outputs, 1)

    def forward(self, x):
        skip = self.down(x)
        return self.head(torch.cat([skip, self.up(self.middle(skip))], 1))


def maps(x):
    """Return which pixels are bright."""
    return (F.avg_pool2d(x.mean(1, keepdim=True), 3, 1, 1) > 0.75).float()


@healthy
def unet_binary():
    """Logits and mask are (N, 1, H, W), most of the mask is background."""
    x, _ = pictures(64)
    model = UNet(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return {"model": model, "loss_fn": nn.BCEWithLogitsLoss(), "loader": loader(x, maps(x)), "optimizer": optimizer}


@healthy
def segmentation_with_ignored_border():
    """Labels of 255 stand outside the classes: they are ignore_index, not an error."""
    x, _ = pictures(64)
    y = maps(x)[:, 0].long() + (maps(x.flip(3))[:, 0].long() & 1)
    y[:, 0], y[:, -1] = 255, 255
    model = UNet(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss_fn = nn.CrossEntropyLoss(ignore_index=255)
    return {"model": model, "loss_fn": loss_fn, "loader": loader(x, y), "optimizer": optimizer}


def dice_loss(logits, mask):
    p = logits.sigmoid().flatten(1)
    mask = mask.flatten(1)
    return (1 - (2 * (p * mask).sum(1) + 1) / (p.sum(1) + mask.sum(1) + 1)).mean()


@healthy
def dice():
    """The loss is an overlap: no known loss, and the sigmoid is inside it."""
    x, _ = pictures(64)
    model = UNet(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return {"model": model, "loss_fn": dice_loss, "loader": loader(x, maps(x)), "optimizer": optimizer}


@healthy
def dice_on_probabilities_with_empty_masks():
    """The model gives probabilities, and some masks are empty: the smoothed overlap of nothing with nothing is 1."""
    x, _ = pictures(64)
    y = maps(x)
    y[::4] = 0
    x[::4] = 0.1 * torch.randn_like(x[::4])
    model = nn.Sequential(UNet(1), nn.Sigmoid())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def loss_fn(p, mask):
        p, mask = p.flatten(1), mask.flatten(1)
        return 1 - ((2 * (p * mask).sum(1) + 1) / (p.sum(1) + mask.sum(1) + 1)).mean()

    return {"model": model, "loss_fn": loss_fn, "loader": loader(x, y), "optimizer": optimizer}


class Detector(nn.Module):
    """Takes a list of pictures and a list of dicts, and gives a dict of losses, as torchvision's detectors do."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU())
        self.classes, self.boxes = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, images, targets=None):
        features = torch.stack([self.body(image[None]).mean((2, 3))[0] for image in images])
        scores, boxes = self.classes(features), self.boxes(features)
        if targets is None:
            return [{"scores": s, "boxes": b} for s, b in zip(scores, boxes, strict=True)]
        labels = torch.stack([t["labels"][0] for t in targets])
        wanted = torch.stack([t["boxes"][0] for t in targets])
        return {"class": F.cross_entropy(scores, labels), "box": F.smooth_l1_loss(boxes, wanted)}


@healthy
def detection():
    """A batch is two lists, of pictures of different sizes and of dicts; the model itself returns a dict of losses."""
    batches = []
    for _ in range(8):
        x, y = pictures(4)
        boxes = torch.stack([torch.stack([c % 2, c // 2, c % 2 + 1, c // 2 + 1]).float() / 2 for c in y])
        images = [image[:, : 12 - i] for i, image in enumerate(x)]
        batches.append((images, [{"boxes": b[None], "labels": c[None]} for b, c in zip(boxes, y, strict=True)]))
    model = Detector()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def train_step(model, batch, optimizer, loss_fn, step):
        losses = model(*batch)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return {"model": model, "loader": batches, "optimizer": optimizer, "train_step": train_step}


@healthy(fast=True)
def images_of_one_pixel():
    """Pictures are 1 x 1, so a spatial smoothness cannot be measured."""
    y = torch.randint(3, (128,))
    x = F.one_hot(y, 3).float()[:, :, None, None] + 0.3 * torch.randn(128, 3, 1, 1)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 3, 1), nn.Flatten())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(x, y), "optimizer": optimizer}


@healthy
def channels_last():
    """Strides are not those of a contiguous tensor, in weights and in pictures."""
    x, y = pictures()
    model = small_net().to(memory_format=torch.channels_last)
    data = loader(x.contiguous(memory_format=torch.channels_last), y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": data, "optimizer": optimizer}


@healthy
def frozen_backbone_in_eval():
    """Most weights are frozen, BatchNorm stays in eval mode, the optimizer holds only the head."""
    backbone = nn.Sequential(*list(small_net())[:-1])
    backbone(pictures()[0])  # statistics of a former training
    backbone.requires_grad_(False)

    class Tuned(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = backbone, nn.Linear(64, 4)

        def train(self, mode=True):
            super().train(mode)
            self.backbone.eval()
            return self

        def forward(self, x):
            with torch.no_grad():
                features = self.backbone(x)
            return self.head(features)

    model = Tuned().train()
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-2)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*pictures()), "optimizer": optimizer}


@healthy(fast=True)
def batchnorm_cumulative():
    """BatchNorm with momentum=None: a cumulative average, not a frozen one."""
    model = small_net()
    model[1] = nn.BatchNorm2d(8, momentum=None)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*pictures()), "optimizer": optimizer}


@healthy
def batchnorm_without_statistics():
    """BatchNorm without running statistics mixes the samples in eval mode too; so does the batch's own norm."""
    model = small_net()
    model[1] = nn.BatchNorm2d(8, track_running_stats=False)
    data = loader(*pictures(), drop_last=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": data, "optimizer": optimizer}


@healthy
def weight_norm():
    """The weight is computed from two parameters at each call."""
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3, 2, 1)),
        nn.ELU(),
        nn.Flatten(),
        nn.utils.parametrizations.weight_norm(nn.Linear(288, 4)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*pictures()), "optimizer": optimizer}


@healthy
def spectral_norm():
    """Buffers of the power iteration change at every forward in train mode."""
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3, 2, 1)),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(288, 4)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*pictures()), "optimizer": optimizer}


class Patches(nn.Module):
    """A vision transformer: patches, a class token, learned positions."""

    def __init__(self, width=16):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 10, width))
        layer = nn.TransformerEncoderLayer(width, 2, 32, 0.1, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 4)
        nn.init.zeros_(self.head.weight)

    def forward(self, x):
        patches = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.places
        return self.head(self.body(tokens)[:, 0])


@healthy
def vision_transformer():
    """The head is zero, so at first nothing behind it has a gradient; the class token begins at zero."""
    model = Patches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(*pictures()), "optimizer": optimizer}


@healthy
def sound():
    """Long one-channel signals, two of which are silent."""
    y = torch.randint(3, (96,))
    time = torch.arange(256) / 256
    x = torch.sin(6.28 * (4 + 8 * y[:, None]) * time + 6.28 * torch.rand(96, 1)) + 0.2 * torch.randn(96, 256)
    x[:2] = 0
    model = nn.Sequential(
        nn.Conv1d(1, 8, 9, 4), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 16, 9, 4), nn.ReLU(), nn.AdaptiveMaxPool1d(1),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(x[:, None], y), "optimizer": optimizer}


class MonteCarlo(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 32), nn.Linear(32, 1)

    def forward(self, x):
        return self.b(F.dropout(F.relu(self.a(x)), 0.2, training=True))


@healthy(fast=True)
def monte_carlo_dropout():
    """Dropout stays on in eval mode, and the code says so."""
    from cases.healthy.data import curve

    model = MonteCarlo()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return {"model": model, "loss_fn": nn.MSELoss(), "loader": loader(*curve()), "optimizer": optimizer}


@healthy
def super_resolution():
    """The output is larger than the input, and the last layer only corrects an enlarged copy."""
    x, _ = pictures(64)

    class Enlarge(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.PReLU(), nn.Conv2d(16, 12, 3, padding=1))
            nn.init.zeros_(self.body[-1].weight)
            nn.init.zeros_(self.body[-1].bias)

        def forward(self, x):
            large = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            return large + F.pixel_shuffle(self.body(x), 2)

    model = Enlarge()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    return {"model": model, "loss_fn": nn.L1Loss(), "loader": loader(F.avg_pool2d(x, 2), x), "optimizer": optimizer}


@healthy
def pixels_from_0_to_255_normalised_inside():
    """Pictures come as whole numbers from 0 to 255 in bytes, and the model brings them to scale."""
    x, y = pictures()
    raw = ((x - x.min()) / (x.max() - x.min()) * 255).to(torch.uint8)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = small_net()

        def forward(self, x):
            return self.net((x.float() / 255 - 0.5) / 0.25)

    model = Scaled()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(raw, y), "optimizer": optimizer}
