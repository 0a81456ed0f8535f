"""Chooses the digits: MNIST of the user, MNIST of this machine, or drawn digits."""

import argparse
from pathlib import Path

from torch.utils.data import Dataset

from common.digits import NUM_TEST, NUM_TRAIN, drawn_mnist_root
from common.torchvision_compat import import_torchvision

_DEFAULT_ROOT = Path("~/.torch/datasets")


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--data-root`` and ``--download``, the options of ``open_mnist``."""
    parser.add_argument(
        "--data-root",
        type=Path,
        metavar="DIR",
        help="folder that holds MNIST in torchvision's layout "
        f"(default: {_DEFAULT_ROOT} if MNIST is there, else digits drawn by this program)",
    )
    parser.add_argument(
        "--download",
        action="store_true",
        help="download MNIST into that folder if it is not there",
    )


def open_mnist(data_root: Path | None, download: bool, train: bool = True) -> Dataset:
    """Return MNIST as pairs of a normalised image (1, 28, 28) and its digit.

    Args:
        data_root: The folder of MNIST; None uses MNIST of this machine, or drawn digits.
        download: Whether the network may be used.
        train: True for the training split, False for the test split.

    Raises:
        SystemExit: ``data_root`` holds no MNIST and ``download`` is False.
    """
    torchvision = import_torchvision()
    transform = torchvision.transforms.Compose(
        [
            torchvision.transforms.ToTensor(),
            torchvision.transforms.Normalize((0.5,), (0.5,)),
        ]
    )

    def mnist(root: Path, download: bool = False) -> Dataset:
        return torchvision.datasets.MNIST(root, train=train, transform=transform, download=download)

    root = (data_root or _DEFAULT_ROOT).expanduser()
    if download:
        return mnist(root, download=True)
    try:
        return mnist(root)
    except RuntimeError as error:  # torchvision raises it if MNIST is not in the folder
        if data_root is not None:
            raise SystemExit(
                f"No MNIST in {data_root}: expected {root / 'MNIST' / 'raw'} with its IDX files. "
                "Give another folder, or --download to fetch it."
            ) from error
    print(
        f"Using drawn digits ({NUM_TRAIN} to train, {NUM_TEST} to test); no MNIST given or found."
    )
    return mnist(drawn_mnist_root())
