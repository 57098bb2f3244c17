"""The padding mask has the wrong polarity: attention reads the padding and ignores the real tokens.

source: https://github.com/earthspecies/avex/pull/26, https://github.com/mlwithme/TransformerTranslation/issues/6
stage: forward
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PAD, VOCAB = 0, 12


class Encoder(nn.Module):
    def __init__(self, bug):
        super().__init__()
        self.bug = bug
        self.embed = nn.Embedding(VOCAB, 16)
        self.query = nn.Parameter(torch.randn(1, 1, 16))
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens):
        h = self.embed(tokens)
        ignore = tokens != PAD if self.bug else tokens == PAD
        query = self.query.expand(len(tokens), 1, 16)
        return self.head(self.attention(query, h, h, key_padding_mask=ignore)[0][:, 0])


# measured: loss after 40 steps 1.1 against 6.3e-06
def make(bug=True):
    torch.manual_seed(0)
    tokens = torch.randint(4, VOCAB, (192, 8))
    y = torch.arange(192) % 3
    tokens[:, 0] = y + 1
    tokens[torch.arange(8)[None] >= torch.randint(3, 8, (192, 1))] = PAD
    model = Encoder(bug)
    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
        "loader": DataLoader(TensorDataset(tokens, y), 32, shuffle=True),
        "pad_id": PAD,
    }


def make_fixed():
    return make(bug=False)
