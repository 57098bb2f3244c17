"""What the README shows of the package runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRELUDE = """
import torch
from torch import nn

torch.manual_seed(0)
model, loss_fn = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = [(torch.randn(4), i % 3) for i in range(64)]
loader = torch.utils.data.DataLoader(samples, 16, shuffle=True)
fn = lambda t: t.sin().sum()
"""


def blocks(page: str) -> list[str]:
    """Return the Python blocks of a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


@pytest.mark.slow
def test_the_five_uses_of_the_readme_run(tmp_path):
    (uses,) = blocks("README.md")
    (tmp_path / "uses.py").write_text(PRELUDE + uses)
    ran = subprocess.run([sys.executable, "uses.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "right" in ran.stdout  # the gradient of sin
