"""Build digits.npz from the copy that scikit-learn ships; byte for byte the same on every machine with one zlib.

    pip install scikit-learn; python data/build_digits.py

The split is drawn once, class by class, and stored with the pictures: a split that is drawn anew in every program is
one that two programs can draw differently.
"""

import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

HERE = Path(__file__).parent


def split(labels: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Return sorted index arrays: of each class 1/6 for validation, 1/6 for the test, the rest for training."""
    generator = np.random.Generator(np.random.PCG64(seed))
    parts: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    for label in range(10):
        members = generator.permutation(np.flatnonzero(labels == label))
        sixth = round(len(members) / 6)
        parts["validation"].append(members[:sixth])
        parts["test"].append(members[sixth : 2 * sixth])
        parts["train"].append(members[2 * sixth :])
    return {name: np.sort(np.concatenate(members)).astype(np.int16) for name, members in parts.items()}


def write_npz(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write arrays as np.savez does, but with a fixed date: np.savez stores the time of writing."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.ascontiguousarray(array), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, buffer.getvalue())


if __name__ == "__main__":
    digits = load_digits()
    labels = digits.target.astype(np.uint8)
    write_npz(HERE / "digits.npz", {"images": digits.images.astype(np.uint8), "labels": labels, **split(labels)})
    digest = hashlib.sha256((HERE / "digits.npz").read_bytes()).hexdigest()
    sums = (HERE / "SHA256SUMS").read_text().splitlines()  # the lines of other files are kept
    others = [line for line in sums if not line.endswith("  digits.npz")]
    (HERE / "SHA256SUMS").write_text("\n".join([f"{digest}  digits.npz", *others]) + "\n")
    print(f"digits.npz: {(HERE / 'digits.npz').stat().st_size} bytes, sha256 {digest}")
