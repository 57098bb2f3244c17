"""A small language model from a configuration, without any download, trained by transformers' Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed

set_seed(0)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
model = GPT2LMHeadModel(config)
words = torch.randint(0, 64, (64, 16))
data = [{"input_ids": row, "labels": row} for row in words]
arguments = TrainingArguments(
    output_dir="trained",
    max_steps=10,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_grad_norm=1.0,
    learning_rate=1e-3,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.remove_callback(PrinterCallback)  # it prints seconds, which are never the same
result = trainer.train()
print(f"{result.global_step} steps, loss {result.training_loss:.6f}")
print(f"{sum(p.double().sum() for p in model.parameters()).item():.9f}")
