"""A Lightning module with a validation, gradient clipping and accumulation, trained by its Trainer."""

import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")  # it recommends more workers


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x), y)

    def validation_step(self, batch, index):
        x, y = batch
        nn.functional.mse_loss(self.layers(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(0, verbose=False)
x = torch.randn(96, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = Net()
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=32))
print(trainer.global_step, f"{sum(p.double().sum() for p in model.parameters()).item():.9f}")
