"""Faults of the data: what is wrong before the model sees a batch."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler, get_worker_info

from cases.builders import batches, classification, clusters, mlp, plain_step, regression, shuffled
from cases.registry import case


class Jittered(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise drawn anew each time: the augmentation of a training set."""

    def __init__(self, x: Tensor, y: Tensor, noise: float) -> None:
        self.x, self.y, self.noise = x, y, noise

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + self.noise * torch.randn(self.x.shape[1]), self.y[index]


@case(
    "augment-on-val",
    stages=("data", "reproduce"),
    causes=("augment-on-val",),
    source="gpleiss/efficient_densenet_pytorch#51",
)
def augment_on_val(bug):
    x, y = clusters(2, 90, 5)
    val = Jittered(x[60:], y[60:], 1.5 if bug else 0.0)
    return classification(
        x=x, y=y, loader=DataLoader(Jittered(x[:60], y[:60], 1.5), 12), val_loader=DataLoader(val, 10)
    )


@case(
    "blank-inputs",
    stages=("data",),
    causes=("blank-inputs",),
    source="https://karpathy.github.io/2019/04/25/recipe/",
)
def blank_inputs(bug):
    y = torch.arange(84) % 3
    pictures = torch.randn(3, 1, 7, 7)[y] + 0.4 * torch.randn(84, 1, 7, 7)
    model = nn.Sequential(nn.Flatten(), mlp(49, 20, 3))
    return classification(x=pictures * (0 if bug else 1), y=y, model=model)  # the reader of the files failed


@case(
    "class-imbalance",
    stages=("data",),
    causes=("class-imbalance",),
    source="emadeldeen24/AttnSleep#18",
)
def class_imbalance(bug):
    y = (torch.arange(480) % 30 == 0).long()
    x = torch.randn(480, 5) + 0.4 * y[:, None]
    balanced = WeightedRandomSampler((1 / torch.bincount(y))[y], 480)
    loader = shuffled(x, y, 60) if bug else DataLoader(TensorDataset(x, y), 60, sampler=balanced)
    return classification(x=x, y=y, loader=loader, dataset=TensorDataset(x, y))


@case(
    "hwc-viewed-as-chw",
    stages=("data",),
    causes=("hwc-viewed-as-chw",),
    source="pytorch/vision#676",
)
def hwc_viewed_as_chw(bug):
    y = torch.arange(72) % 3  # the colour that is strongest
    ramp = torch.linspace(0, 1, 10)
    smooth = (ramp[:, None] * ramp)[None, :, :, None]
    stored = smooth * (0.2 + F.one_hot(y, 3).float())[:, None, None] + 0.04 * torch.randn(72, 10, 10, 3)
    x = stored.reshape(72, 3, 10, 10) if bug else stored.permute(0, 3, 1, 2).contiguous()
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))
    return classification(x=x, y=y, model=model, lr=0.03)


@case(
    "label-dtype-float",
    stages=("data", "loss"),
    causes=("label-dtype-float",),
    source="milesial/Pytorch-UNet#93",
)
def label_dtype_float(bug):
    x, y = clusters()
    return classification(x=x, y=y, loader=batches(x, y.float() if bug else y))


@case(
    "label-out-of-range",
    stages=("data", "loss"),
    causes=("label-out-of-range",),
    source="EricFillion/happy-transformer#248",
)
def label_out_of_range(bug):
    x, y = clusters(4)
    return classification(x=x, y=y, loader=batches(x, y + 1 if bug else y))  # numbered from 1


@case(
    "labels-misaligned",
    stages=("data",),
    causes=("labels-misaligned",),
    source="chuanyangjin/fast-DiT#4",
    hint=True,
)
def labels_misaligned(bug):
    x, y = clusters(4, 480, 10)
    y = y[torch.randperm(480)] if bug else y  # the second list of files came in another order
    return classification(x=x, y=y, loader=shuffled(x, y, 48), model=nn.Linear(10, 4), lr=0.03)


@case(
    "labels-shifted-by-one",
    stages=("data",),
    causes=("labels-shifted-by-one",),
    source="seisbench/seisbench#181",
)
def labels_shifted_by_one(bug):
    y = torch.randint(0, 4, (480,))
    x = 2 * torch.randn(4, 9)[y] + torch.randn(480, 9)
    y = y.roll(1) if bug else y  # a header row was read as a label
    dataset = TensorDataset(x, y)
    return classification(x=x, y=y, model=nn.Linear(9, 4), loader=DataLoader(dataset, 48), dataset=dataset, lr=0.03)


@case(
    "last-batch-of-one-bn",
    stages=("data", "forward"),
    causes=("last-batch-of-one-bn",),
    source="pytorch/pytorch#7716",
)
def last_batch_of_one_bn(bug):
    x, y = clusters(2, 37, 6)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 2))
    return classification(x=x, y=y, model=model, loader=DataLoader(TensorDataset(x, y), 12, drop_last=not bug))


@case(
    "mask-0-255-bce",
    stages=("data", "loss"),
    causes=("mask-0-255-bce",),
    source="milesial/Pytorch-UNet#78",
)
def mask_0_255_bce(bug):
    x = torch.randn(40, 1, 9, 9)
    mask = (F.avg_pool2d(x, 3, 1, 1) > 0.05).float() * (255 if bug else 1)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 3, padding=1))
    return classification(x=x, y=mask, model=model, loss_fn=nn.BCEWithLogitsLoss())


@case(
    "nan-in-inputs",
    stages=("data",),
    causes=("nan-in-inputs",),
    source="Innse/MOTCat#8",
)
def nan_in_inputs(bug):
    x = torch.randn(64, 6)
    y = x @ torch.randn(6, 1)
    if bug:
        x[53, 4] = float("nan")  # in the last batch of an epoch only
    return regression(x=x, y=y)


@case(
    "nan-in-targets",
    stages=("data",),
    causes=("nan-in-targets",),
    source="pytorch/pytorch#89543",
)
def nan_in_targets(bug):
    x = torch.randn(64, 6)
    y = x @ torch.randn(6, 1)
    if bug:
        y[[20, 41]] = float("nan")
    return regression(x=x, y=y, model=mlp(6, 16, 1, between=nn.Tanh))


@case(
    "no-shuffle-sorted",
    stages=("data",),
    causes=("no-shuffle-sorted",),
    source="Deci-AI/super-gradients#416",
)
def no_shuffle_sorted(bug):
    x, y = clusters(4, 120, 7, 1.0)
    order = y.argsort(stable=True)  # one folder after the other
    dataset = TensorDataset(x[order], y[order])
    return classification(x=x, y=y, loader=DataLoader(dataset, 15, shuffle=not bug))


class FirstBatchAlways:
    """``next(iter(loader))`` inside the loop: every step reads the first batch."""

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[list[Tensor]]:
        for _ in self.loader:
            yield next(iter(self.loader))


@case(
    "same-batch-forever",
    stages=("data",),
    causes=("same-batch-forever",),
    source="leohsuofnthu/Pytorch-IterativeFCN#7",
)
def same_batch_forever(bug):
    x = torch.randn(84, 9)
    y = (x[:, 0] * x[:, 1] > 0).long()
    loader = DataLoader(TensorDataset(x, y), 14)
    return classification(x=x, y=y, loader=FirstBatchAlways(loader) if bug else loader)


class OwnGenerator(Dataset[tuple[Tensor, Tensor]]):
    """Noise from a generator that the data set made for itself: each worker gets a copy of it, and draws the same."""

    def __init__(self, shared: bool, lazy: bool = False) -> None:
        self.rng = np.random.default_rng(3) if shared else None
        self.lazy = lazy
        self.x, self.y = clusters(2, 24, 3)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.lazy and self.rng is None:  # made where the worker knows its own seed
            worker = get_worker_info()
            self.rng = np.random.default_rng(worker.seed if worker else 3)
        noise = torch.as_tensor((self.rng or np.random).standard_normal(3), dtype=torch.float32)
        return self.x[index] + 0.1 * noise, self.y[index]


@case(
    "same-worker-rng",
    stages=("data",),
    causes=("same-worker-rng",),
    source="facebookresearch/fairseq#1383",
)
def same_worker_rng(bug):
    data = OwnGenerator(shared=bug)
    loader = DataLoader(data, 6, shuffle=True, num_workers=2, multiprocessing_context="fork")
    return classification(x=data.x, y=data.y, loader=loader, dataset=data)


@case(
    "workers-share-rng",
    stages=("data", "reproduce"),
    causes=("same-worker-rng",),
    source="pytorch/pytorch#5059",
)
def workers_share_rng(bug):
    data = OwnGenerator(shared=bug, lazy=True)
    return classification(x=data.x, y=data.y, loader=DataLoader(data, 6, num_workers=2, multiprocessing_context="fork"))


@case(
    "target-scale",
    stages=("data", "loss"),
    causes=("target-scale",),
    source="https://theorangeduck.com/page/neural-network-not-working",
)
def target_scale(bug):
    x = torch.randn(64, 5)
    price = 3e5 + 6e4 * (x @ torch.randn(5, 1))
    return regression(x=x, y=price if bug else (price - price.mean()) / price.std(), lr=0.01)


@case(
    "train-val-overlap",
    stages=("data",),
    causes=("train-val-overlap", "validates-on-training-set"),
    source="huggingface/datasets#4261",
)
def train_val_overlap(bug):
    x, y = torch.randn(150, 11), torch.randint(0, 2, (150,))  # noise: honestly half of it is right
    held = slice(75, 110) if bug else slice(110, 150)
    return classification(
        x=x, y=y, loader=shuffled(x[:110], y[:110], 22), val_loader=batches(x[held], y[held]), lr=0.02
    )


@case(
    "unnormalised-inputs",
    stages=("data",),
    causes=("unnormalised-inputs",),
    source="https://theorangeduck.com/page/neural-network-not-working",
)
def unnormalised_inputs(bug):
    y = torch.arange(120) % 4
    pixels = (160 * torch.rand(4, 40)[y] + 95 * torch.rand(120, 40)).round()
    x = pixels if bug else (pixels - 128) / 64
    model = mlp(40, 48, 4)
    return classification(x=x, y=y, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1))


@case(
    "standardised-per-batch",
    stages=("data",),
    causes=("standardised-per-batch",),
    source="deepinv/deepinv#908",
)
def standardised_per_batch(bug):
    x, y = clusters(3, 144, 5)
    x = 40 + 7 * x
    mean, std = x.mean(0), x.std(0)

    def train_step(model, batch, optimizer, loss_fn, step):
        x, y = batch
        x = (x - x.mean(0)) / x.std(0) if bug else (x - mean) / std
        return plain_step(model, (x, y), optimizer, loss_fn, step)

    return classification(x=x, y=y, loader=shuffled(x, y, 24), train_step=train_step)


@case(
    "val-column-constant",
    stages=("data",),
    causes=("val-column-constant",),
    source="neurodata/SPORF#355",
)
def val_column_constant(bug):
    x = torch.randn(160, 5)
    y = x @ torch.randn(5, 1) + torch.randn(160, 1)
    last = y[:, 0] + 0.1 * torch.randn(160)
    if bug:
        last[96:] = -1.0  # nobody knows it yet
    x = torch.cat([x, last[:, None]], 1)
    return regression(x=x[:96], y=y[:96], val_loader=batches(x[96:], y[96:], 32))


@case(
    "val-classes-renumbered",
    stages=("data",),
    causes=("val-permuted",),
    source="weecology/DeepForest#1147",
)
def val_classes_renumbered(bug):
    x, y = clusters(3, 192, 6, apart=3.0)
    held = torch.tensor([1, 2, 0])[y[128:]] if bug else y[128:]
    return classification(x=x[:128], y=y[:128], val_loader=batches(x[128:], held, 32), lr=0.02)


@case(
    "val-channels-swapped",
    stages=("data",),
    causes=("val-permuted",),
    source="TreB1eN/InsightFace_Pytorch#92",
)
def val_channels_swapped(bug):
    y = torch.arange(192) % 3
    x = 0.2 * torch.randn(192, 3, 4, 4) + F.one_hot(y, 3)[:, :, None, None] * torch.rand(192, 1, 4, 4)
    held = x[128:].flip(1) if bug else x[128:]
    model = nn.Sequential(nn.Conv2d(3, 12, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 3))
    return classification(x=x[:128], y=y[:128], model=model, val_loader=batches(held, y[128:], 32), lr=0.03)
