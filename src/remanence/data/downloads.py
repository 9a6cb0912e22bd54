"""The address and the hash of each file of the published datasets, and the folder of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Download:
    """One published file.

    Args:
        url: its address.
        md5: the hash that publishers print; it detects broken transfers.
        into: the folder below the data folder.
        holds: for an archive: a name in it whose folder becomes `into`; empty: not an archive.
        optional: fetched only with `everything`.
    """

    url: str
    md5: str
    into: str
    holds: str = ""
    optional: bool = False

    @property
    def name(self) -> str:
        """The file name."""
        return self.url.rsplit("/", 1)[-1]


def _files(base: str, into: str, hashes: dict[str, str]) -> tuple[Download, ...]:
    return tuple(Download(f"{base}/{name}", md5, into) for name, md5 in hashes.items())


DOWNLOADS: dict[str, tuple[Download, ...]] = {
    "cifar10": (
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            "cifar-10-batches-bin",
            "test_batch.bin",
        ),
    ),
    "cifar100": (
        Download(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            "cifar-100-binary",
            "test.bin",
        ),
    ),
    "cinic10": (
        Download(
            "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
            "6ee4d0c996905fe93221de577967a372",
            "CINIC-10",
            "valid",
        ),
    ),
    "emnist": (
        Download(
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "58c8d27c78d21e728a6bc7b3cc06412e",
            "emnist",
            "emnist-byclass-train-images-idx3-ubyte.gz",
        ),
    ),
    "fashion_mnist": _files(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
        "fashion-mnist",
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
    "mnist": _files(
        # the authors' own page no longer serves the files
        "https://ossci-datasets.s3.amazonaws.com/mnist",
        "mnist",
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "svhn": (
        Download(
            "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
            "e26dedcc434d2e4c54c9b2d4a06d8373",
            "svhn",
        ),
        Download(
            "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
            "eb5a983be6a315427106f1b164d9cef3",
            "svhn",
        ),
        Download(
            "http://ufldl.stanford.edu/housenumbers/extra_32x32.mat",
            "a93ce644f1a588dc4d68dda5feec44a7",
            "svhn",
            optional=True,
        ),
    ),
}

# Datasets without a single address, and how to get them.
BY_HAND = {
    "femnist": "LEAF makes it from NIST's files: clone github.com/TalwalkarLab/leaf, run"
    " data/femnist/preprocess.sh -s niid --sf 1.0 -t sample,"
    " and put the resulting data/train and data/test below femnist/",
    "mnist_by_writer": "write MNIST grouped by writer (QMNIST's labels give the writers), as JSON"
    " in the layout of LEAF, to leaf-mnist-by-writer/",
    "pacs": "ask for it on the page of its authors (Li, Yang, Song, Hospedales 2017) and unpack"
    " its four domain folders below PACS/",
}
COMES_WITH = ("digits", "synthetic", "tokens")  # need no files
USER_DATA = ("folder", "hub", "npz", "pfllib", "table")

# The folders of each dataset below the data folder, to find out without reading that it is missing.
FOLDERS: dict[str, tuple[str, ...]] = {
    "cifar10": ("cifar-10-batches-bin", "cifar-10-batches-py"),
    "cifar100": ("cifar-100-binary", "cifar-100-python"),
    "cinic10": ("CINIC-10", "cinic10", "cinic-10"),
    "emnist": ("emnist", "EMNIST/raw"),
    "fashion_mnist": ("fashion-mnist", "FashionMNIST/raw"),
    "femnist": ("femnist", "leaf/femnist/data"),
    "mnist": ("mnist", "MNIST/raw"),
    "mnist_by_writer": ("leaf-mnist-by-writer",),
    "pacs": ("PACS", "pacs"),
    "svhn": ("svhn", "SVHN"),
}


def is_missing(name: str, root: Path | None) -> bool:
    """Return whether none of the folders of a published dataset exists."""
    return name in FOLDERS and (
        root is None or not any((root / folder).is_dir() for folder in FOLDERS[name])
    )


def download_hint(name: str) -> str:
    """Return how to get a dataset, as the end of a sentence."""
    return (
        f"get it with remanence data fetch {name}"
        if name in DOWNLOADS
        else BY_HAND.get(name, "name its folder with --data-dir")
    )
