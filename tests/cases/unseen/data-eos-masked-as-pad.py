"""pad is set to the eos token and every pad label is masked with -100: the model never learns to stop.

source: https://github.com/huggingface/trl/issues/976, https://github.com/mlabonne/llm-course/issues/33
stage: data, loss
"""

import torch
from torch import nn
from torch.nn import functional as F

EOS, VOCAB, LENGTH = 0, 10, 9


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 24)
        self.rnn = nn.GRU(24, 32, batch_first=True)
        self.head = nn.Linear(32, VOCAB)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


# measured: p(eos) at the last real token after 40 steps 0.00019 against 0.48
def make(bug=True):
    torch.manual_seed(0)
    pad = EOS if bug else 1
    rows = torch.full((192, LENGTH + 1), pad)
    for i in range(192):
        first, length = int(torch.randint(2, 8, ())), int(torch.randint(3, 7, ()))
        rows[i, :length] = 2 + (first + torch.arange(length)) % (VOCAB - 2)
        rows[i, length] = EOS
    x, y = rows[:, :-1], rows[:, 1:].clone()
    y[y == pad] = -100
    model = Model()
    return {
        "model": model,
        "loss_fn": lambda out, t: F.cross_entropy(out.flatten(0, 1), t.flatten()),
        "causal": True,
        "pad_id": pad,
        "loader": list(zip(x.split(32), y.split(32), strict=True)),
        "optimizer": torch.optim.Adam(model.parameters(), 1e-2),
    }


def make_fixed():
    return make(bug=False)
