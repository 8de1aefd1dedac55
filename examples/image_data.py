"""Real images without a download: MNIST-style idx files, or scikit-learn's scanned digits."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.data import TensorDataset

DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # apt-get install dataset-fashion-mnist
IMAGE, LABEL = 3, 1  # dimensions of an idx file of images, of labels


class Images(NamedTuple):
    """Grey images as float tensors [N, 1, 28, 28] with zero mean, labels as int64 [N]."""

    name: str
    train: TensorDataset
    test: TensorDataset


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file of bytes (http://yann.lecun.com/exdb/mnist describes the format), gzipped or not."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if data[:4] != bytes((0, 0, 8, dimensions)):
        raise SystemExit(f"{path} is not an idx file of {dimensions}-dimensional bytes")
    header = 4 + 4 * dimensions
    shape = np.frombuffer(data[4:header], ">u4")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _idx_pair(directory: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = []
    for kind, dimensions in (("images", IMAGE), ("labels", LABEL)):
        found = sorted(directory.glob(f"{part}-{kind}[-.]idx{dimensions}-ubyte*"))
        if not found:
            raise SystemExit(
                f"{directory} holds no {part}-{kind}-idx{dimensions}-ubyte(.gz); "
                f"give the folder of the four MNIST or Fashion-MNIST files to --data"
            )
        arrays.append(torch.from_numpy(read_idx(found[0], dimensions).copy()))
    images, labels = arrays
    return images.unsqueeze(1).float() / 255, labels.long()


def _digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """1,797 scans of handwritten digits, 8 × 8, enlarged; every fifth one is held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
    images = interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
    labels = torch.from_numpy(digits.target).long()
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = shuffled[: len(labels) // 5], shuffled[len(labels) // 5 :]
    return (images[train], labels[train]), (images[test], labels[test])


def load(directory: str | None) -> Images:
    """Images from `directory`, else Debian's Fashion-MNIST, else scikit-learn's digits.

    The directory "digits" stands for scikit-learn's digits, wherever Fashion-MNIST is.
    """
    folder = Path(directory) if directory else DEBIAN
    if directory != "digits" and (directory or folder.is_dir()):
        name = "Fashion-MNIST" if "fashion" in str(folder.resolve()).lower() else folder.name
        train, test = _idx_pair(folder, "train"), _idx_pair(folder, "t10k")
    else:
        name, (train, test) = "digits", _digits()
    mean, std = train[0].mean(), train[0].std()
    train, test = ((images.sub(mean).div(std), labels) for images, labels in (train, test))
    return Images(name, TensorDataset(*train), TensorDataset(*test))
