"""Train the net of lesson 03 by the reference configuration, and keep its weights as data/digits_cnn.pt.

    python notebooks/src/make_digits_checkpoint.py

Lesson 04 attacks it. Its sha256 goes into SHA256SUMS; the other lines there are kept.
"""

import hashlib
import tempfile
from pathlib import Path

import torch

import dxdy_nb as dx
from dxdy_nb.training.datasets import DATA

CHECKPOINT = DATA / "digits_cnn.pt"


def record_sum(path: Path) -> str:
    """Write a file's sha256 into the SHA256SUMS beside it, in place of its old line, and return it."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sums = path.parent / "SHA256SUMS"
    others = [line for line in sums.read_text().splitlines() if line.split()[1] != path.name]
    sums.write_text("\n".join([*others, f"{digest}  {path.name}"]) + "\n")
    return digest


if __name__ == "__main__":
    torch.set_num_threads(1)  # as lesson 03: another number of threads rounds to other last digits
    with tempfile.TemporaryDirectory() as folder:
        run = dx.train(dx.RunConfig(device="cpu"), out=Path(folder) / "run")
    torch.save(run.model.state_dict(), CHECKPOINT)
    digest = record_sum(CHECKPOINT)
    print(f"{CHECKPOINT.name}: {CHECKPOINT.stat().st_size} bytes, sha256 {digest}")
    print(f"test accuracy {run.metrics['test_accuracy']}, validation accuracy {run.metrics['validation_accuracy']}")
