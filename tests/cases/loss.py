"""Faults of the loss: it measures something else than was meant."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from cases.builders import batches, classification, clusters, mlp, regression, shuffled
from cases.registry import case


def follows(words, samples, length):
    """Return texts in which each word follows from the one before it, but for a coin toss."""
    text = torch.randint(0, words, (samples, length))
    for t in range(1, length):
        text[:, t] = (2 * text[:, t - 1] + 1 + torch.randint(0, 2, (samples,))) % words
    return text


def token_model(words, **options):
    return nn.Sequential(nn.Embedding(words, 20, **options), nn.Linear(20, words))


@case(
    "all-ignored",
    stages=("data", "loss"),
    causes=("all-ignored",),
    source="pytorch/pytorch#116349",
)
def all_ignored(bug):
    x = torch.randint(0, 8, (48, 5))
    y = (3 * x + 1) % 8
    y[:, 0] = -100
    y[24:32] = -100  # prompts longer than the window

    def loss_fn(output, target):
        total = F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100, reduction="sum")
        labels = (target != -100).sum()
        return total / (labels if bug else labels.clamp_min(1))

    return classification(x=x, y=y, model=token_model(8), loss_fn=loss_fn, loader=batches(x, y, 8))


@case(
    "bce-on-logits",
    stages=("forward", "loss"),
    causes=("bce-on-logits",),
    source="yunlongdong/FCN-pytorch#7",
)
def bce_on_logits(bug):
    x, y = clusters(2)
    model = nn.Sequential(*mlp(8, 24, 1), *([] if bug else [nn.Sigmoid()]))
    return classification(x=x, y=y[:, None].float(), model=model, loss_fn=nn.BCELoss())


@case(
    "ce-single-logit",
    stages=("loss",),
    causes=("ce-single-logit",),
    source="cnulab/RealNet#101",
)
def ce_single_logit(bug):
    x, y = clusters(2)
    return classification(x=x, y=y * (not bug), model=mlp(8, 20, 1 if bug else 2))


@case(
    "class-weights-swapped",
    stages=("data", "loss"),
    causes=("class-weights-swapped", "class-imbalance"),
    source="amanshenoy/multilogue-net#21",
)
def class_weights_swapped(bug):
    y = (torch.arange(480) % 12 == 0).long()
    x = torch.randn(480, 5) + 1.4 * y[:, None]
    weight = torch.tensor([12 / 11, 12.0])
    loss_fn = nn.CrossEntropyLoss(weight=weight.flip(0) if bug else weight)
    return classification(x=x, y=y, loss_fn=loss_fn, loader=shuffled(x, y, 48), dataset=TensorDataset(x, y))


@case(
    "dice-counts-eps-twice",
    stages=("loss",),
    causes=("dice-counts-eps-twice",),
    source="milesial/Pytorch-UNet#24",
)
def dice_counts_eps_twice(bug):
    x = torch.randn(60, 1, 7, 7) - 2.2  # most masks are empty
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 1, 1), nn.Sigmoid())

    def loss_fn(output, target, smooth=1.0):
        both, all_of_them = (output * target).sum((1, 2, 3)), (output + target).sum((1, 2, 3))
        top = 2 * (both + smooth) if bug else 2 * both + smooth
        return 1 - (top / (all_of_them + smooth)).mean()

    return classification(x=x, y=(x > 0).float(), model=model, loss_fn=loss_fn)


@case(
    "kldiv-swapped",
    stages=("loss",),
    causes=("kldiv-swapped",),
    source="pytorch/pytorch#57459",
    hint=True,
)
def kldiv_swapped(bug):
    x = torch.randn(120, 5)
    teacher = (x @ torch.randn(5, 4)).softmax(1)

    def loss_fn(output, target):
        if bug:  # in the order of the textbook
            return F.kl_div(target.log(), output.softmax(1), reduction="batchmean")
        return F.kl_div(output.log_softmax(1), target, reduction="batchmean")

    return classification(x=x, y=teacher, model=mlp(5, 3, 4), loss_fn=loss_fn, lr=0.02)


@case(
    "labels-shifted-twice",
    stages=("data", "loss"),
    causes=("labels-shifted-twice",),
    source="huggingface/transformers#44642",
)
def labels_shifted_twice(bug):
    text = follows(9, 128, 11)

    def loss_fn(output, target):  # the targets are shifted already
        output, target = (output[:, :-1], target[:, 1:]) if bug else (output, target)
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    return classification(x=text[:, :-1], y=text[:, 1:], model=token_model(9), loss_fn=loss_fn, causal=True, lr=0.03)


@case(
    "log-of-zero",
    stages=("loss",),
    causes=("log-of-zero",),
    source="mkocabas/focal-loss-keras#17",
)
def log_of_zero(bug):
    x, y = clusters(4, 128, 8, 1.0)
    model = nn.Linear(8, 4)
    nn.init.normal_(model.weight, std=40.0)  # as sure of itself as late in training

    def loss_fn(output, target):
        logs = output.softmax(1).log() if bug else output.log_softmax(1)
        return -logs.gather(1, target[:, None]).mean()

    return classification(x=x, y=y, model=model, loss_fn=loss_fn, optimizer=torch.optim.SGD(model.parameters(), 0.5))


@case(
    "loss-rewrapped",
    stages=("loss", "backward"),
    causes=("loss-rewrapped",),
    source="roman-vygon/triplet_loss_kws#6",
)
def loss_rewrapped(bug):
    def loss_fn(output, target):
        loss = F.cross_entropy(output, target)
        return loss.detach().requires_grad_() if bug else loss

    return classification(loss_fn=loss_fn)


@case(
    "loss-rewrapped-in-step",
    stages=("loss", "backward"),
    causes=("loss-rewrapped",),
    source="speechbrain/speechbrain#735",
)
def loss_rewrapped_in_step(bug):
    def train_step(model, batch, optimizer, loss_fn, step):
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch[1])
        loss = torch.tensor(loss.item(), requires_grad=True) if bug else loss
        loss.backward()
        optimizer.step()
        return loss

    return regression(train_step=train_step)


@case(
    "mse-broadcast",
    stages=("loss",),
    causes=("mse-broadcast",),
    source="pytorch/pytorch#16045",
)
def mse_broadcast(bug):
    x = torch.randn(96, 6)
    y = x @ torch.randn(6, 1)
    return regression(x=x, y=y[:, 0] if bug else y)


@case(
    "mse-on-class-index",
    stages=("data", "loss"),
    causes=("mse-on-class-index",),
    source="FluxML/model-zoo#8",
    hint=True,
)
def mse_on_class_index(bug):
    def as_numbers(output, target):
        return F.mse_loss(output[:, 0], target.float())

    x, y = clusters(5, 160)
    return classification(
        x=x, y=y, model=mlp(8, 24, 1 if bug else 5), loss_fn=as_numbers if bug else nn.CrossEntropyLoss()
    )


@case(
    "nan-times-mask",
    stages=("data", "loss"),
    causes=("nan-in-targets",),
    source="pytorch/pytorch#89543",
)
def nan_times_mask(bug):
    x = torch.randn(64, 5)
    y = x.mean(1, keepdim=True)
    y[::6] = float("nan")

    def loss_fn(output, target):
        known = ~target.isnan()
        if bug:
            return ((output - target).square() * known).sum() / known.sum()
        return (output[known] - target[known]).square().mean()

    return regression(x=x, y=y, loss_fn=loss_fn)


@case(
    "nll-on-logits",
    stages=("loss",),
    causes=("nll-on-logits",),
    source="keon/seq2seq#5",
)
def nll_on_logits(bug):
    model = nn.Sequential(*mlp(8, 24, 3), *([] if bug else [nn.LogSoftmax(1)]))
    return classification(model=model, loss_fn=nn.NLLLoss())


@case(
    "not-scalar",
    stages=("loss", "backward"),
    causes=("not-scalar",),
    source="WisconsinAIVision/MaskPoint#7",
)
def not_scalar(bug):
    return classification(loss_fn=nn.CrossEntropyLoss(reduction="none" if bug else "mean"))


@case(
    "sigmoid-then-bcelogits",
    stages=("forward", "loss"),
    causes=("sigmoid-then-bcelogits",),
    source="avBuffer/UNet3plus_pth#23",
)
def sigmoid_then_bcelogits(bug):
    x, y = clusters(2)
    model = nn.Sequential(*mlp(8, 24, 1), *([nn.Sigmoid()] if bug else []))
    return classification(x=x, y=y[:, None].float(), model=model, loss_fn=nn.BCEWithLogitsLoss())


@case(
    "softmax-then-ce",
    stages=("forward", "loss"),
    causes=("softmax-then-ce",),
    source="ariecattan/SciCo#2",
)
def softmax_then_ce(bug):
    x, y = clusters(6, 120)
    return classification(x=x, y=y, model=nn.Sequential(*mlp(8, 32, 6), *([nn.Softmax(1)] if bug else [])))


@case(
    "trains-on-padding",
    stages=("data", "loss"),
    causes=("trains-on-padding",),
    source="huggingface/transformers#24725",
)
def trains_on_padding(bug):
    x = torch.randint(1, 10, (96, 10))
    y = (x * 4) % 9 + 1
    x[:, 4:] = y[:, 4:] = 0
    ignored = -100 if bug else 0

    def loss_fn(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=ignored)

    return classification(x=x, y=y, model=token_model(10, padding_idx=0), loss_fn=loss_fn, pad_id=0, lr=0.03)


@case(
    "wrong-sign",
    stages=("loss", "update"),
    causes=("wrong-sign",),
    source="nebuly-ai/optimate#250",
)
def wrong_sign(bug):
    def loss_fn(output, target):
        likelihood = output.log_softmax(1).gather(1, target[:, None]).mean()
        return likelihood if bug else -likelihood

    return classification(loss_fn=loss_fn)


@case(
    "accum-mean-of-means",
    stages=("loss", "update"),
    causes=("accum-mean-of-means",),
    source="huggingface/transformers#34191",
)
def accum_mean_of_means(bug):
    x = torch.randint(0, 10, (12, 8))
    y = x.roll(-1, 1)
    for row in range(12):
        y[row, 1 if row // 3 % 2 else 8 :] = -100  # every other micro-batch is nearly all padding
    loader = batches(x, y, 3)
    labels = [int((target != -100).sum()) for _, target in loader]

    def loss_fn(output, target):
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-100)

    def train_step(model, batch, optimizer, loss_fn, step):
        place, last = step % len(labels), step % 2 == 1
        loss = loss_fn(model(batch[0]), batch[1])
        window = labels[place - 1] + labels[place] if last else labels[place] + labels[place + 1]
        (loss / 2 if bug else loss * labels[place] / window).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return classification(
        x=x, y=y, model=token_model(10), loss_fn=loss_fn, loader=loader, train_step=train_step, accumulation_steps=2
    )


@case(
    "ctc-labels-hold-blank",
    stages=("loss", "data"),
    causes=("not-for-this-loss",),
    source="espnet/espnet#700",
)
def ctc_labels_hold_blank(bug):
    y = torch.randint(0, 4, (64, 2))
    x = 2 * F.one_hot(y, 4).float().repeat_interleave(3, 1) + 0.3 * torch.randn(64, 6, 4)

    def loss_fn(output, target):
        lengths = (torch.full((len(output),), steps) for steps in (6, 2))
        return F.ctc_loss(output.log_softmax(-1).transpose(0, 1), target, *lengths)

    y = y if bug else y + 1
    return classification(x=x, y=y, model=mlp(4, 24, 5), loss_fn=loss_fn)


@case(
    "cosine-targets-zero-one",
    stages=("loss", "data"),
    causes=("not-for-this-loss",),
    source="pytorch/pytorch#8316",
)
def cosine_targets_zero_one(bug):
    same = torch.arange(96) % 2
    first = torch.randn(96, 6)
    second = torch.where(same[:, None] > 0, first + 0.3 * torch.randn(96, 6), torch.randn(96, 6))
    x = torch.stack([first, second], 1)

    def loss_fn(output, target):
        return F.cosine_embedding_loss(output[:, 0], output[:, 1], target)

    return classification(x=x, y=same if bug else 2 * same - 1, model=mlp(6, 24, 5), loss_fn=loss_fn)


@case(
    "hinge-on-zero-one",
    stages=("loss", "data"),
    causes=("not-for-this-loss",),
    source="deepchem/deepchem#5017",
)
def hinge_on_zero_one(bug):
    x, y = clusters(2)
    y = y[:, None].float()

    def loss_fn(output, target):
        return (1 - target * output).relu().mean()

    return classification(x=x, y=y if bug else 2 * y - 1, model=mlp(8, 24, 1), loss_fn=loss_fn)


@case(
    "sigmoid-then-ce",
    stages=("loss", "forward"),
    causes=("softmax-then-ce",),
    source="eriklindernoren/PyTorch-YOLOv3#10",
)
def sigmoid_then_ce(bug):
    return classification(model=nn.Sequential(*mlp(8, 24, 3), *[nn.Sigmoid()] * bug))


@case(
    "class-axis-by-view",
    stages=("loss",),
    causes=("class-axis-by-view",),
    source="weirme/FCSN#32",
)
def class_axis_by_view(bug):
    y = torch.randint(0, 3, (64, 5))
    x = 2 * torch.randn(3, 8)[y] + torch.randn(64, 5, 8)

    def loss_fn(output, target):
        scores = output.view(len(output), 3, -1) if bug else output.transpose(1, 2)
        return F.cross_entropy(scores, target)

    return classification(x=x, y=y, model=mlp(8, 24, 3), loss_fn=loss_fn)


@case(
    "averaged-twice",
    stages=("loss", "update"),
    causes=("averaged-twice",),
    source="bigmb/Unet-Segmentation-Pytorch-Nest-of-Unets#18",
)
def averaged_twice(bug):
    def loss_fn(output, target):
        loss = F.mse_loss(output, target)
        return loss / len(target) if bug else loss

    return regression(loss_fn=loss_fn)


def overlap_setup(bug, loss_fn, *last):
    y = (torch.arange(36) % 6 > torch.randint(1, 5, (96, 1))).float()
    return regression(x=2 * y + torch.randn(96, 36), y=y, model=nn.Sequential(*mlp(36, 48, 36), *last), loss_fn=loss_fn)


@case(
    "jaccard-on-logits",
    stages=("loss",),
    causes=("perfect-is-not-best",),
    source="ScrollPrize/villa#1644",
)
def jaccard_on_logits(bug):
    def loss_fn(output, target):
        shares = output if bug else output.sigmoid()
        common = (shares * target).sum(1)
        return (1 - common / (shares.sum(1) + target.sum(1) - common)).mean()

    return overlap_setup(bug, loss_fn)


@case(
    "intervals-by-centre",
    stages=("loss",),
    causes=("perfect-is-not-best",),
    source="stevebottos/owl-vit-object-detection#14",
)
def intervals_by_centre(bug):
    """Intervals are given by centre and width, and compared by their two ends."""
    wide = 0.1 + 0.6 * torch.rand(96, 1)
    centre = wide / 2 + (1 - wide) * torch.rand(96, 1)
    y = torch.cat([centre, wide], 1)
    where = torch.linspace(0, 1, 24)
    x = ((where - centre).abs() < wide / 2).float()

    def loss_fn(output, target):
        a, b = output, target
        if not bug:
            a, b = (torch.stack([v[:, 0] - v[:, 1] / 2, v[:, 0] + v[:, 1] / 2], 1) for v in (output, target))
        common = torch.minimum(a[:, 1], b[:, 1]) - torch.maximum(a[:, 0], b[:, 0])
        hull = torch.maximum(a[:, 1], b[:, 1]) - torch.minimum(a[:, 0], b[:, 0])
        return (1 - common / hull).mean()

    return regression(x=x, y=y, model=nn.Sequential(*mlp(24, 32, 2), nn.Sigmoid()), loss_fn=loss_fn)
