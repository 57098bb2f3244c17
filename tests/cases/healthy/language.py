"""Tokens and sequences."""

import copy

import torch
import torch.nn.functional as F
from nets import Transformer
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from cases.healthy import healthy
from cases.healthy.data import loader, sentences


class Shifted(torch.utils.data.Dataset):
    """Windows of a text, and the same one token on."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index, :-1], self.tokens[index, 1:]


def flat_entropy(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def small_gpt(tied=False):
    model = Transformer(layers=2, width=32, heads=4, words=20, longest=16)
    if tied:
        model.head.weight = model.word.weight
        nn.init.normal_(model.word.weight, std=0.02)
    return model


@healthy
def gpt():
    """Targets are the next tokens, already shifted; the model looks back only."""
    model = small_gpt()
    data = torch.utils.data.DataLoader(Shifted(sentences()), 16, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    return {"model": model, "loss_fn": flat_entropy, "loader": data, "optimizer": optimizer, "causal": True}


@healthy
def gpt_undeclared():
    """The same without saying that it is next-token training; tied weights, clipping and a warm-up."""
    model = small_gpt(tied=True)
    data = torch.utils.data.DataLoader(Shifted(sentences()), 16, shuffle=True)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, step / 10))

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = loss_fn(model(batch[0]), batch[1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    given = {"model": model, "loss_fn": flat_entropy, "loader": data, "optimizer": optimizer, "scheduler": scheduler}
    return {**given, "train_step": train_step}


@healthy
def gpt_shifts_in_the_loss():
    """Batch and labels are the same tokens; the loss itself drops the last logit and the first label."""
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = sentences()

    def loss_fn(logits, labels):
        return F.cross_entropy(logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1))

    data = loader(tokens, tokens.clone())
    return {"model": model, "loss_fn": loss_fn, "loader": data, "optimizer": optimizer, "causal": True}


@healthy
def packed_documents_with_prompt_masked():
    """Fine-tuning: the prompt's labels are -100, so most positions have no gradient."""
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = sentences()
    labels = tokens[:, 1:].clone()
    labels[:, :7] = -100
    data = loader(tokens[:, :-1], labels)
    return {"model": model, "loss_fn": flat_entropy, "loader": data, "optimizer": optimizer, "causal": True}


@healthy
def character_gru_stateful():
    """Truncated backpropagation: the state is carried from batch to batch, cut from its graph."""

    class Writer(nn.Module):
        def __init__(self):
            super().__init__()
            self.word, self.cell, self.head = nn.Embedding(20, 16), nn.GRU(16, 32, batch_first=True), nn.Linear(32, 20)
            self.state = None

        def forward(self, x):
            out, state = self.cell(self.word(x), self.state)
            self.state = state.detach()
            return self.head(out)

    model = Writer()
    text = sentences(16, 97)
    batches = [(text[:, i : i + 12], text[:, i + 1 : i + 13]) for i in range(0, 96, 12)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return {"model": model, "loss_fn": flat_entropy, "loader": batches, "optimizer": optimizer}


@healthy
def truncated_backpropagation_in_the_step():
    """Several updates in one training step, each on a window; the hidden state is detached between them."""
    cell, head = nn.LSTMCell(4, 16), nn.Linear(16, 4)
    model = nn.ModuleDict({"cell": cell, "head": head})
    x = torch.sin(torch.arange(0, 40).float()[None, :, None] * torch.rand(32, 1, 4) + torch.rand(32, 1, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train_step(model, batch, optimizer, loss_fn, step):
        (series,) = batch
        h = c = torch.zeros(len(series), 16)
        total = 0.0
        for begin in range(0, 30, 10):
            loss = 0
            for t in range(begin, begin + 10):
                h, c = model["cell"](series[:, t], (h, c))
                loss = loss + loss_fn(model["head"](h), series[:, t + 1]) / 10
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            h, c = h.detach(), c.detach()
            total += loss.item()
        return total / 3

    data = loader(x, size=8)
    return {"model": model, "loss_fn": nn.MSELoss(), "loader": data, "optimizer": optimizer, "train_step": train_step}


def padded(n=96, longest=12, words=20):
    """Return padded sentences, their lengths and a tag for each token (-100 at the padding)."""
    tokens = sentences(n, longest, words)
    lengths = torch.randint(3, longest + 1, (n,))
    outside = torch.arange(longest) >= lengths[:, None]
    tags = (tokens % 3).masked_fill(outside, -100)
    return tokens.masked_fill(outside, 0), lengths, tags


@healthy
def lstm_tagger_padded():
    """Half of the positions are padding; their tags are ignored."""
    tokens, _, tags = padded()

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.word = nn.Embedding(20, 16, padding_idx=0)
            self.body = nn.LSTM(16, 16, batch_first=True, bidirectional=True, num_layers=2, dropout=0.2)
            self.head = nn.Linear(32, 3)

        def forward(self, x):
            return self.head(self.body(self.word(x))[0])

    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    given = {"model": model, "loss_fn": flat_entropy, "loader": loader(tokens, tags), "optimizer": optimizer}
    return given | {"pad_id": 0}


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.body, self.head = nn.Embedding(20, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(self.word(x), lengths, batch_first=True, enforce_sorted=False)
        out, _ = self.body(packed)
        return self.head(pad_packed_sequence(out, batch_first=True, total_length=x.size(1))[0])


@healthy
def packed_sequences():
    """The model takes tokens and lengths, and packs them inside; sorting mixes the order of the samples."""
    tokens, lengths, tags = padded()
    model = Packed()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = loader(tokens, lengths, tags)
    return {"model": model, "loss_fn": flat_entropy, "loader": data, "optimizer": optimizer}


@healthy
def packed_as_batches():
    """A batch is a PackedSequence with its flat targets: a named tuple that is no list of tensors."""
    data = []
    for _ in range(6):
        rows = [torch.randn(n, 5) for n in (7, 5, 3, 2)]
        packed = nn.utils.rnn.pack_sequence(rows)
        data.append((packed, (packed.data.sum(1) > 0).long()))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.GRU(5, 16), nn.Linear(16, 2)

        def forward(self, packed):
            return self.head(self.body(packed)[0].data)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": data, "optimizer": optimizer}


class Encoder(nn.Module):
    """A transformer over tokens whose padding is masked, with the mean of the real tokens behind it."""

    def __init__(self, outputs=3, pooled=True):
        super().__init__()
        self.word, self.place = nn.Embedding(20, 16, padding_idx=0), nn.Embedding(16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head, self.pooled = nn.Linear(16, outputs), pooled

    def forward(self, x):
        outside = x == 0
        h = self.word(x) + self.place(torch.arange(x.size(1)))
        h = self.body(h, src_key_padding_mask=outside)
        if self.pooled:
            real = (~outside)[..., None]
            h = (h * real).sum(1) / real.sum(1)
        return self.head(h)


@healthy
def transformer_with_padding_mask():
    """Padding is masked in attention and left out of the mean; sentences differ in length."""
    tokens, _, _ = padded()
    y = (tokens[:, 0] % 3).long()
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    given = {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(tokens, y), "optimizer": optimizer}
    return given | {"pad_id": 0}


@healthy
def variable_length_batches():
    """Each batch is padded to its own longest sentence, so shapes differ from step to step."""
    rows = [(s[: int(n)], int(s[0] % 3)) for s, n in zip(sentences(96), torch.randint(4, 13, (96,)), strict=True)]

    def collate(items):
        return pad_sequence([t for t, _ in items], batch_first=True), torch.tensor([y for _, y in items])

    model = Encoder()
    data = torch.utils.data.DataLoader(rows, 8, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": data, "optimizer": optimizer}


@healthy
def masked_language_model():
    """Tokens look at later tokens, as they should; 85 % of the labels are -100; the batch has input and label alike."""
    tokens = sentences(128, 12, 19)
    hidden = torch.rand(tokens.shape) < 0.15
    hidden[:, 3] = True
    labels = tokens.masked_fill(~hidden, -100)
    model = Encoder(20, pooled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = loader(tokens.masked_fill(hidden, 19), labels)
    return {"model": model, "loss_fn": flat_entropy, "loader": data, "optimizer": optimizer}


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(21, 16), nn.Embedding(16, 16)
        self.body = nn.Transformer(16, 2, 1, 1, 32, 0.1, batch_first=True)
        self.head = nn.Linear(16, 21)

    def forward(self, source, target):
        places = self.place(torch.arange(source.size(1)))
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        h = self.body(self.word(source) + places, self.word(target) + places, tgt_mask=mask)
        return self.head(h)


@healthy
def translation_teacher_forced():
    """The decoder is given the answer shifted by one: input and target share most tokens, and source is seen whole."""
    source = sentences(96, 8)
    answer = source.flip(1)
    given = torch.cat([torch.full((96, 1), 20), answer[:, :-1]], 1)
    model = Translator()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = loader(source, given, answer)
    return {"model": model, "loss_fn": flat_entropy, "loader": data, "optimizer": optimizer}


@healthy
def scheduled_sampling():
    """A coin decides at each step whether the decoder sees the answer or its own argmax, which has no gradient."""

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.word, self.cell, self.head = nn.Embedding(20, 16), nn.GRUCell(16, 32), nn.Linear(32, 20)

        def forward(self, answer):
            h, token, out = torch.zeros(len(answer), 32), answer[:, 0], []
            for t in range(1, answer.size(1)):
                h = self.cell(self.word(token), h)
                out.append(self.head(h))
                token = answer[:, t] if torch.rand(()) < 0.7 else out[-1].argmax(1)
            return torch.stack(out, 1)

    tokens = sentences(96, 8)
    model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = loader(tokens, tokens[:, 1:].clone())
    return {"model": model, "loss_fn": flat_entropy, "loader": data, "optimizer": optimizer}


@healthy
def speech_ctc():
    """The loss takes four arguments, wants (T, N, C) log-probabilities and aligns by itself."""
    body = nn.GRU(6, 24, bidirectional=True)
    head = nn.Linear(48, 5)
    model = nn.ModuleDict({"body": body, "head": head})
    labels = torch.randint(1, 5, (64, 4))
    sound = F.one_hot(labels, 6).float().repeat_interleave(3, 1) + 0.3 * torch.randn(64, 12, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loss_fn = nn.CTCLoss(zero_infinity=True)

    def train_step(model, batch, optimizer, loss_fn, step):
        x, y = batch
        scores = model["head"](model["body"](x.transpose(0, 1))[0]).log_softmax(2)
        loss = loss_fn(scores, y, torch.full((len(x),), 12), torch.full((len(x),), 4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    given = {"model": model, "loss_fn": loss_fn, "loader": loader(sound, labels), "optimizer": optimizer}
    return given | {"train_step": train_step}


@healthy(fast=True)
def sparse_embedding_bag():
    """Gradients are sparse, most rows never get one, and the optimizer is made for it."""
    words = torch.randint(50, (256, 6))
    y = (words < 25).float().mean(1).gt(0.5).long()
    model = nn.Sequential(nn.EmbeddingBag(50, 2, sparse=True))
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.05)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(words, y), "optimizer": optimizer}


@healthy
def sparse_and_dense_optimizers():
    """Two optimizers share one model: SparseAdam the embedding, AdamW the rest."""
    words = torch.randint(50, (256, 6))
    y = (words < 25).float().mean(1).gt(0.5).long()
    table = nn.Embedding(50, 8, sparse=True)
    rest = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 2))
    model = nn.Sequential(table, rest)
    optimizers = [torch.optim.SparseAdam(table.parameters(), lr=0.02), torch.optim.AdamW(rest.parameters(), lr=5e-3)]
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": loader(words, y), "optimizers": optimizers}


class LowRank(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(rank, base.in_features))
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + 2.0 * x @ self.down.T @ self.up.T


@healthy
def lora():
    """All but a few weights are frozen; one factor begins at zero, so the other has no gradient at first."""
    model = small_gpt()
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.out = LowRank(block.qkv), LowRank(block.out)
        block.up = LowRank(block.up)
    tokens = sentences()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    data = loader(tokens[:, :-1], tokens[:, 1:])
    return {"model": model, "loss_fn": flat_entropy, "loader": data, "optimizer": optimizer, "causal": True}


@healthy
def adapters():
    """Narrow bottlenecks with a zero output between frozen layers; the head is new and trains."""
    model = Encoder(3)
    model.requires_grad_(False)
    model.head = nn.Linear(16, 3)

    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.down, self.up = inner, nn.Linear(16, 4), nn.Linear(4, 16)
            nn.init.zeros_(self.up.weight)
            nn.init.zeros_(self.up.bias)

        def forward(self, x, **more):
            h = self.inner(x, **more)
            return h + self.up(F.relu(self.down(h)))

    model.body.layers[1] = Adapter(model.body.layers[1])
    tokens, _, _ = padded()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    data = loader(tokens, tokens[:, 0] % 3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": data, "optimizer": optimizer}


@healthy
def prompt_tuning():
    """Only an embedding in front is trained; everything behind it is frozen and still passes gradients through."""
    body = copy.deepcopy(Encoder(3)).requires_grad_(False)

    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.prompt = body, nn.Parameter(0.1 * torch.randn(1, 4, 16))

        def forward(self, x):
            words = self.body.word(x) + self.body.place(torch.arange(x.size(1)))
            h = self.body.body(torch.cat([self.prompt.expand(len(x), -1, -1), words], 1))
            return self.body.head(h[:, :4].mean(1))

    model = Prompted()
    tokens = sentences(96, 8)
    optimizer = torch.optim.Adam([model.prompt], lr=0.1)
    data = loader(tokens, tokens[:, 0] % 3)
    return {"model": model, "loss_fn": nn.CrossEntropyLoss(), "loader": data, "optimizer": optimizer}
