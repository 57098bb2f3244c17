"""Models and loops of other libraries, where these are installed; all weights are random."""

import torch
from torch import nn

from cases.healthy import healthy
from cases.healthy.data import blobs, loader, pictures, sentences

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def rows(**columns):
    """Return a loader of dicts."""
    names = list(columns)
    items = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return torch.utils.data.DataLoader(items, 16, shuffle=True)


def masked(tokens):
    """Return tokens padded at the right, and their mask."""
    lengths = torch.randint(4, tokens.size(1) + 1, (len(tokens), 1))
    mask = (torch.arange(tokens.size(1)) < lengths).long()
    return tokens * mask, mask


def given(model, data, lr=2e-3, **more):
    return {"model": model.train(), "loader": data, "optimizer": torch.optim.AdamW(model.parameters(), lr=lr)} | more


@healthy(needs="transformers")
def bert_classifier():
    """The batch is a dict of keywords and the model gives the loss; the padding is masked."""
    from transformers import BertConfig, BertForSequenceClassification

    tokens, mask = masked(sentences(96, 12, 30))
    model = BertForSequenceClassification(BertConfig(vocab_size=30, num_labels=3, **TINY))
    return given(model, rows(input_ids=tokens, attention_mask=mask, labels=tokens[:, 0] % 3))


@healthy(needs="transformers")
def bert_tokens_own_loss():
    """The same library without labels: a loss function takes the logits out of the output."""
    from transformers import BertConfig, BertForTokenClassification

    tokens, mask = masked(sentences(96, 12, 30))
    tags = (tokens % 3).masked_fill(mask == 0, -100)
    model = BertForTokenClassification(BertConfig(vocab_size=30, num_labels=3, **TINY))

    def train_step(model, batch, optimizer, loss_fn, step):
        output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        loss = loss_fn(output.logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss

    data = rows(input_ids=tokens, attention_mask=mask, labels=tags)
    return given(model, data, loss_fn=nn.CrossEntropyLoss(), train_step=train_step)


@healthy(needs="transformers")
def bert_masked_words():
    """The decoder's weight is tied to the embedding; nearly all labels are -100."""
    from transformers import BertConfig, BertForMaskedLM

    tokens = sentences(96, 12, 29)
    hidden = torch.rand(tokens.shape) < 0.2
    hidden[:, 2] = True
    model = BertForMaskedLM(BertConfig(vocab_size=30, **TINY))
    return given(model, rows(input_ids=tokens.masked_fill(hidden, 29), labels=tokens.masked_fill(~hidden, -100)))


@healthy(needs="transformers")
def gpt2():
    """Labels are the input itself: the model shifts them; head and embedding share one weight."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    tokens = sentences(96, 12, 30)
    return given(model, rows(input_ids=tokens, labels=tokens), causal=True)


@healthy(needs="transformers")
def llama_with_padding():
    """Rotary positions, grouped heads, and labels of -100 at the padding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens, mask = masked(sentences(96, 12, 30))
    model = LlamaForCausalLM(LlamaConfig(vocab_size=30, num_key_value_heads=1, max_position_embeddings=16, **TINY))
    data = rows(input_ids=tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))
    return given(model, data, pad_id=0)


@healthy(needs="transformers")
def t5_translates():
    """Encoder and decoder; the decoder's input is made from the labels inside the model."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=30, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config)
    tokens, mask = masked(sentences(96, 10, 30))
    data = rows(input_ids=tokens, attention_mask=mask, labels=tokens.flip(1).masked_fill(mask.flip(1) == 0, -100))
    return given(model, data)


@healthy(needs="transformers")
def bart_translates():
    """Another Seq2Seq: three embeddings share one weight, and a buffer holds a bias that is never trained."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=30, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, pad_token_id=0,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=16,
    )  # fmt: skip
    model = BartForConditionalGeneration(config)
    tokens = sentences(96, 10, 30)
    return given(model, rows(input_ids=tokens, labels=tokens.flip(1)))


@healthy(needs="transformers")
def vit_pictures():
    """Pictures as a keyword, a class token, and a head that begins near zero."""
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(image_size=12, patch_size=4, num_labels=4, **TINY))
    x, y = pictures(96)
    return given(model, rows(pixel_values=x, labels=y))


@healthy(needs="lightning")
def lightning_module():
    """The loss is inside training_step, which also logs; the module has hooks and a trainer that is not there."""
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            x, y = batch
            return nn.functional.cross_entropy(self(x), y)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=5e-3)

    model = Lit()

    def train_step(model, batch, optimizer, loss_fn, step):
        loss = model.training_step(batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    optimizer = model.configure_optimizers()
    return {"model": model, "loader": loader(*blobs()), "optimizer": optimizer, "train_step": train_step}
