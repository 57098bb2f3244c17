"""Faults of the forward pass: the model computes something else than was meant."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from cases.builders import batches, classification, clusters, mlp, quadrants, regression
from cases.registry import case


class Encoder(nn.Module):
    """An encoder and a head, with a place between them where things go wrong."""

    def __init__(self, between, outputs=3, inputs=8):
        super().__init__()
        self.encoder, self.head = nn.Linear(inputs, 16), nn.Linear(16, outputs)
        self.between = between

    def forward(self, x):
        return self.head(self.between(self.encoder(x), x))


@case(
    "argmax-in-forward",
    stages=("forward", "backward"),
    causes=("argmax-in-forward",),
    source="Ugenteraan/Deep_Hierarchical_Classification#6",
)
def argmax_in_forward(bug):
    def code(h, x):
        soft = h.softmax(1)
        return F.one_hot(soft.argmax(1), 16).float() if bug else soft

    return classification(model=Encoder(code), lr=0.03)


@case(
    "bn-momentum-frozen",
    stages=("forward",),
    causes=("bn-momentum-frozen",),
    source="Cadene/pretrained-models.pytorch#5",
)
def bn_momentum_frozen(bug):
    x, y = clusters(3, 120, 6, 1.5)
    x = 5 + 3 * x
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=0.0 if bug else 0.1), mlp(6, 24, 3))
    return classification(x=x, y=y, model=model, val_loader=batches(x, y))


class Attends(nn.Module):
    """One layer of attention over tokens."""

    def __init__(self, words, longest, causal):
        super().__init__()
        self.word, self.place = nn.Embedding(words, 24), nn.Parameter(0.5 * torch.randn(longest, 24))
        self.qkv, self.out, self.head = nn.Linear(24, 72), nn.Linear(24, 24), nn.Linear(24, words)
        self.causal = causal

    def forward(self, tokens):
        h = self.word(tokens) + self.place[: tokens.shape[1]]
        q, k, v = self.qkv(h).chunk(3, -1)
        return self.head(h + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))


def next_token_loss(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@case(
    "causal-leak",
    stages=("forward",),
    causes=("causal-leak",),
    source="huggingface/transformers#31673",
)
def causal_leak(bug):
    text = torch.randint(0, 11, (160, 9))  # random: what comes next cannot be known
    model = Attends(11, 8, causal=not bug)
    return classification(x=text[:, :-1], y=text[:, 1:], model=model, loss_fn=next_token_loss, causal=True)


@case(
    "dead-relu",
    stages=("forward", "backward"),
    causes=("dead-relu",),
    source="facebookresearch/dlrm#358",
)
def dead_relu(bug):
    model = mlp(8, 24, 24, 3)
    if bug:
        nn.init.constant_(model[2].bias, -40.0)
    return classification(model=model)


@case(
    "detach-cut",
    stages=("forward", "backward"),
    causes=("detach-cut",),
    source="lucidrains/CoCa-pytorch#6",
)
def detach_cut(bug):
    def between(h, x):
        return h.relu().detach() if bug else h.relu()

    return classification(model=Encoder(between))


@case(
    "detach-cuts-encoder",
    stages=("forward", "backward"),
    causes=("detach-cut",),
    source="speechbrain/speechbrain#1396",
)
def detach_cuts_encoder(bug):
    def between(h, x):
        return torch.tensor(h.tanh().tolist()) if bug else h.tanh()  # by way of Python numbers

    return regression(model=Encoder(between, 1, 6))


@case(
    "dropout-keep-prob",
    stages=("forward",),
    causes=("dropout-keep-prob",),
    source="hassony2/kinetics_i3d_pytorch#6",
)
def dropout_keep_prob(bug):
    keep = 0.94
    dropped = keep if bug else 1 - keep
    model = nn.Sequential(mlp(8, 30), nn.ReLU(), nn.Dropout(dropped), mlp(30, 30, 3))
    x, y = clusters(3, 120)
    return classification(x=x, y=y, model=model, val_loader=batches(x, y))


@case(
    "exploding-init",
    stages=("forward", "backward"),
    causes=("exploding-init",),
    source="leonardoaraujosantos/DLMatFramework#16",
)
def exploding_init(bug):
    model = mlp(*[48] * 11, 3)
    for layer in model[:-1:2]:
        (nn.init.normal_ if bug else nn.init.kaiming_normal_)(layer.weight)
    x, y = clusters(3, 64, 48, 1.0)
    return classification(x=x, y=y, model=model, lr=1e-3)


@case(
    "final-relu",
    stages=("forward", "loss"),
    causes=("final-relu",),
    source="hunkim/PyTorchZeroToAll#4",
)
def final_relu(bug):
    x = torch.randn(64, 6)
    model = nn.Sequential(*mlp(6, 24, 1), *([nn.ReLU()] if bug else []))
    return regression(
        x=x, y=x @ torch.randn(6, 1) - 5, model=model, optimizer=torch.optim.Adam(model.parameters(), 0.03)
    )


@case(
    "functional-dropout-eval",
    stages=("forward",),
    causes=("functional-dropout-eval",),
    source="pytorch/pytorch#26338",
)
def functional_dropout_eval(bug):
    def between(h, x):
        return F.dropout(h.relu(), 0.4) if bug else F.dropout(h.relu(), 0.4, training=model.training)

    model = Encoder(between)
    x, y = clusters()
    return classification(x=x, y=y, model=model, val_loader=batches(x, y))


@case(
    "inplace-residual",
    stages=("forward", "backward"),
    causes=("inplace-residual",),
    source="argusswift/YOLOv4-pytorch#247",
)
def inplace_residual(bug):
    def between(h, x):
        h = h.sigmoid()
        if bug:
            h += 0.1  # sigmoid's backward needs what it returned
            return h
        return h + 0.1

    return regression(model=Encoder(between, 1, 6))


@case(
    "left-in-eval",
    stages=("forward",),
    causes=("left-in-eval",),
    source="wkentaro/pytorch-fcn#57",
)
def left_in_eval(bug):
    x, y = clusters()
    model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 3))
    return classification(x=x + 4, y=y, model=model.train(not bug))


class Pools(nn.Module):
    """Attention in which padding is masked; a sequence that is all padding has nothing to attend to."""

    def __init__(self, masked):
        super().__init__()
        self.word, self.query, self.head = nn.Embedding(9, 12, padding_idx=0), nn.Linear(12, 12), nn.Linear(12, 2)
        self.masked = masked

    def forward(self, tokens):
        h = self.word(tokens)
        scores = self.query(h) @ h.transpose(1, 2) / 12**0.5
        weights = scores.masked_fill((tokens == 0)[:, None], self.masked).softmax(-1)
        return self.head((weights @ h).mean(1))


@case(
    "masked-row-nan",
    stages=("forward",),
    causes=("nonfinite-activation",),
    source="pytorch/pytorch#41508",
)
def masked_row_nan(bug):
    x = torch.randint(1, 9, (64, 6))
    y = (x[:, 0] > 4).long()
    x[:, 5] = 0
    x[45] = 0  # an empty text
    return classification(x=x, y=y, model=Pools(float("-inf") if bug else -1e4))


@case(
    "missing-activation",
    stages=("forward",),
    causes=("missing-activation",),
    source="nutonomy/nuscenes-devkit#728",
)
def missing_activation(bug):
    x, y = quadrants()
    return classification(x=x, y=y, model=mlp(2, 28, 28, 2, between=nn.Identity if bug else nn.ReLU), lr=0.02)


class Blocks(nn.Module):
    """Layers kept in whatever they come in."""

    def __init__(self, layers, width, outputs):
        super().__init__()
        self.layers, self.head = layers, nn.Linear(width, outputs)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


@case(
    "python-list-layers",
    stages=("forward", "backward", "update"),
    causes=("unregistered-list",),
    source="pytorch/pytorch#666",
)
def python_list_layers(bug):
    layers = [nn.Linear(8, 20), nn.Linear(20, 20)]
    return classification(model=Blocks(layers if bug else nn.ModuleList(layers), 20, 3))


@case(
    "unregistered-list",
    stages=("forward", "backward", "update"),
    causes=("unregistered-list",),
    source="pytorch/pytorch#59925",
)
def unregistered_list(bug):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            layers = {name: nn.Linear(6, 12) for name in ("left", "right")}
            self.layers, self.head = layers if bug else nn.ModuleDict(layers), nn.Linear(12, 1)

        def forward(self, x):
            return self.head(self.layers["left"](x).relu() * self.layers["right"](x).sigmoid())

    return regression(model=Experts())


@case(
    "repeated-layer-shared",
    stages=("forward",),
    causes=("repeated-layer-shared",),
    source="linkedin/Liger-Kernel#269",
    hint=True,
)
def repeated_layer_shared(bug):
    x = torch.randn(120, 8)
    block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    blocks = [block] * 4 if bug else [copy.deepcopy(block) for _ in range(4)]
    for each in blocks:
        nn.init.xavier_normal_(each[0].weight)
    y = (2 * x[:, :1]).sin() * x[:, 1:2]
    return regression(x=x, y=y, model=nn.Sequential(*blocks, nn.Linear(8, 1)))


@case(
    "sqrt-zero-nan-grad",
    stages=("forward", "backward"),
    causes=("nan-gradient",),
    source="pytorch/pytorch#2421",
)
def sqrt_zero_nan_grad(bug):
    class Length(nn.Module):
        def __init__(self):
            super().__init__()
            self.map, self.scale = nn.Linear(5, 7, bias=False), nn.Parameter(torch.ones(1))

        def forward(self, x):
            squares = self.map(x).square().sum(1, keepdim=True)
            return self.scale * (squares + (0.0 if bug else 1e-8)).sqrt()

    x = torch.randn(64, 5)
    x[9] = 0
    return regression(x=x, y=x.norm(dim=1, keepdim=True), model=Length(), lr=0.01)


@case(
    "squeeze-batch-dim",
    stages=("data", "forward", "loss"),
    causes=("squeeze-batch-dim",),
    source="NVIDIA/tacotron2#303",
)
def squeeze_batch_dim(bug):
    class Pointwise(nn.Conv2d):
        def forward(self, x):
            out = super().forward(x)
            return out.squeeze() if bug else out.flatten(1)

    x, y = clusters(3, 49, 5)  # batches of 16, 16, 16 and 1
    return classification(x=x[:, :, None, None], y=y, model=Pointwise(5, 3, 1))


@case(
    "symmetric-init",
    stages=("forward",),
    causes=("symmetric-init",),
    source="yz93/LAVT-RIS#25",
)
def symmetric_init(bug):
    x, y = quadrants()
    model = mlp(2, 28, 2, between=nn.Tanh)
    if bug:
        for p in model.parameters():
            nn.init.constant_(p, 0.2)
    return classification(x=x, y=y, model=model, lr=0.03)


@case(
    "vanishing-deep-sigmoid",
    stages=("forward", "backward"),
    causes=("vanishing-gradients",),
    source="phlippe/uvadlc_notebooks#119",
)
def vanishing_deep_sigmoid(bug):
    x, y = clusters(2, 64)
    model = mlp(8, *[28] * 12, 2, between=nn.Sigmoid if bug else nn.ReLU)
    if not bug:
        for layer in model[::2]:
            nn.init.kaiming_normal_(layer.weight)
    return classification(x=x, y=y, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.05))


@case(
    "view-not-permute",
    stages=("forward",),
    causes=("view-not-permute",),
    source="zhouhaoyi/Informer2020#59",
)
def view_not_permute(bug):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 6), nn.Linear(30, 3)

        def forward(self, x):  # (B, T, D)
            states = self.rnn(x.transpose(0, 1))[0]  # (T, B, 6)
            return self.head((states if bug else states.transpose(0, 1)).reshape(len(x), -1))

    y = torch.randint(0, 3, (96,))
    x = 1.5 * torch.randn(3, 5, 3)[y] + 0.5 * torch.randn(96, 5, 3)
    return classification(x=x, y=y, model=Tagger())


@case(
    "whole-forward-no-grad",
    stages=("forward", "backward"),
    causes=("whole-forward-no-grad",),
    source="davidmascharka/tbd-nets#8",
)
def whole_forward_no_grad(bug):
    class Predicts(nn.Linear):
        def forward(self, x):
            with torch.set_grad_enabled(not bug):
                return super().forward(x)

    return classification(model=Predicts(8, 3))


@case(
    "where-nan-grad",
    stages=("forward", "backward"),
    causes=("nan-gradient",),
    source="pytorch/pytorch#68425",
)
def where_nan_grad(bug):
    def between(h, x):
        inside = h if bug else torch.where(h > 0, h, 1.0)
        return torch.where(h > 0, inside.log1p().sqrt(), 0.0)

    return regression(model=Encoder(between, 1, 6))


@case(
    "where-nan-grad-division",
    stages=("forward", "backward"),
    causes=("nan-gradient",),
    source="pytorch/pytorch#36923",
)
def where_nan_grad_division(bug):
    x = torch.randn(64, 6)
    x[::9] = 0  # rows that the model is to leave alone

    def between(h, x):
        size = x.norm(dim=1, keepdim=True)
        safe = size if bug else torch.where(size > 0, size, 1.0)
        return torch.where(size > 0, h * scale / safe, 0.0)

    model = Encoder(between, 1, 6)
    scale = model.scale = nn.Parameter(torch.ones(1))
    return regression(x=x, model=model)


@case(
    "data-inplace-wrong-grad",
    stages=("forward", "backward"),
    causes=("data-inplace-wrong-grad", "wrong-custom-backward"),
    source="pytorch/pytorch#6990",
)
def data_inplace_wrong_grad(bug):
    def between(h, x):
        h = h.sigmoid()
        if not bug:
            return 0.3 * h
        h.data.mul_(0.3)
        return h

    return regression(model=Encoder(between, 1, 6))


@case(
    "round-kills-gradient",
    stages=("forward", "backward"),
    causes=("round-kills-gradient", "zero-gradient"),
    source="Justin-Tan/generative-compression#27",
)
def round_kills_gradient(bug):
    def between(h, x):
        steps = (3 * h).round()
        return steps if bug else 3 * h + (steps - 3 * h).detach()

    return regression(model=Encoder(between, 1, 6), lr=0.01)


@case(
    "frozen-bn-drifts",
    stages=("forward", "backward", "update", "reproduce"),
    causes=("frozen-bn-drifts",),
    source="open-mmlab/mmpretrain#702",
    hint=True,
)
def frozen_bn_drifts(bug):
    body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False).train(bug)
    model = nn.Sequential(body, nn.Linear(16, 1))
    x = 3 * torch.randn(64, 6) + 1
    return regression(x=x, model=model, optimizer=torch.optim.SGD(model[1].parameters(), 0.01))


@case(
    "eval-mode-stuck",
    stages=("forward", "reproduce"),
    causes=("eval-mode-stuck", "left-in-eval"),
    source="joeynmt/joeynmt#184",
)
def eval_mode_stuck(bug):
    model = nn.Sequential(nn.Linear(8, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 3))

    def validate():
        model.eval()
        with torch.no_grad():
            right = (model(x).argmax(1) == y).float().mean()
        model.train(not bug)
        return right

    x, y = clusters()
    return classification(x=x, y=y, model=model, on_epoch_end=validate)


@case(
    "targets-out-of-reach",
    stages=("forward", "data"),
    causes=("targets-out-of-reach",),
    source="carpedm20/NAF-tensorflow#8",
)
def targets_out_of_reach(bug):
    x = torch.randn(96, 4)
    y = 3 * torch.sin(x[:, :2])
    return regression(x=x, y=y if bug else y / 3, model=nn.Sequential(*mlp(4, 24, 2), nn.Tanh()))


class Cosines(nn.Module):
    """Class scores are cosines of an embedding with one vector a class."""

    def __init__(self, axis):
        super().__init__()
        self.body, self.classes, self.axis = mlp(8, 24, 5), nn.Linear(5, 3), axis

    def forward(self, x):
        return self.classes(9 * F.normalize(self.body(x), dim=self.axis))


@case(
    "normalised-over-batch",
    stages=("forward",),
    causes=("shrinks-with-batch",),
    source="alireza-nasiri/SoundCLR#4",
)
def normalised_over_batch(bug):
    return classification(model=Cosines(0 if bug else 1))


class Bag(nn.Module):
    """The sum of the vectors of some words, and a layer."""

    def __init__(self, rows):
        super().__init__()
        self.table, self.head = nn.Embedding(rows, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.table(x.clamp(max=self.table.num_embeddings - 1)).sum(1))


@case(
    "ids-share-a-row",
    stages=("forward", "data"),
    causes=("ids-share-a-row",),
    source="NVIDIA/Megatron-LM#2570",
)
def ids_share_a_row(bug):
    y = torch.arange(120) % 3
    x = 3 * torch.randint(0, 30, (120, 6)) + y[:, None]
    return classification(x=x, y=y, model=Bag(20 if bug else 90))


class Asks(nn.Module):
    """One learnt question to a text; padding is not to be read."""

    def __init__(self, bug):
        super().__init__()
        self.table, self.question = nn.Embedding(12, 16), nn.Parameter(torch.randn(1, 1, 16))
        self.attention, self.head, self.bug = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 3), bug

    def forward(self, x):
        h = self.table(x)
        hidden = x > 0 if self.bug else x == 0
        return self.head(self.attention(self.question.expand(len(x), 1, 16), h, h, key_padding_mask=hidden)[0][:, 0])


def padded(samples, length, longest):
    """Return texts whose first word is one of three, padded with 0 to one length, and that word's number."""
    y = torch.arange(samples) % 3
    x = torch.cat([1 + y[:, None], torch.randint(4, 12, (samples, length - 1))], 1)
    return x * (torch.arange(length) < torch.randint(2, longest, (samples, 1))), y


@case(
    "reads-padding-only",
    stages=("forward",),
    causes=("reads-padding-only",),
    source="earthspecies/avex#26",
)
def reads_padding_only(bug):
    x, y = padded(120, 9, 9)
    return classification(x=x, y=y, model=Asks(bug), pad_id=0)


class Recurrent(nn.Module):
    """A recurrent net over words, read at its last step or at the end of either direction."""

    def __init__(self, last, both):
        super().__init__()
        self.table, self.head, self.last = nn.Embedding(12, 12), nn.Linear(16 * (1 + both), 3), last
        self.rnn = nn.GRU(12, 16, bidirectional=both)  # time comes first

    def forward(self, x):
        steps = self.rnn(self.table(x.T))[0].transpose(0, 1)
        if self.last:
            return self.head(steps[:, -1])
        ends = steps[torch.arange(len(x)), (x != 0).sum(1) - 1]
        return self.head(torch.cat([ends[:, :16], steps[:, 0, 16:]], 1))


@case(
    "last-step-of-both-directions",
    stages=("forward",),
    causes=("last-step-read",),
    source="yunjey/pytorch-tutorial#149",
)
def last_step_of_both_directions(bug):
    x = torch.randint(1, 12, (144, 24))
    return classification(x=x, y=x[:, 0] % 3, model=Recurrent(bug, True), lr=0.03)


@case(
    "last-step-is-padding",
    stages=("forward",),
    causes=("last-step-read",),
    source="thtrieu/qclass_dl#1",
)
def last_step_is_padding(bug):
    x, _ = padded(144, 32, 8)
    last = x[torch.arange(144), (x != 0).sum(1) - 1]
    return classification(x=x, y=last % 3, model=Recurrent(bug, False), lr=0.03, pad_id=0)
