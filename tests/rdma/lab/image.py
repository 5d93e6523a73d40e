"""Builds what a lab host boots: kernel, first file system, disk image. Everything is kept for the next run."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rdma.lab.host import KERNELS, NoLabError, debian_sources, run

GUEST: Final = Path(__file__).parent / "guest"
EARLY_MODULES: Final = ("virtio_pci", "virtio_blk", "ext4", "overlay")
DEBIAN_PACKAGES: Final = (
    "python3",
    "ibverbs-utils",
    "ibverbs-providers",
    "rdma-core",
    "perftest",
    "iproute2",
    "iputils-ping",
    "kmod",
    "procps",
)
PYTHON_PACKAGES: Final = (
    "torch",
    "cryptography",
    "grpcio",
    "google-crc32c",
    "protobuf",
    "psutil",
    "safetensors",
    "numpy",
    "nixl-cu12",
    "rich",
    "py-spy",
)
"""With all that they need. They come from the environment that runs the tests."""
_NOT_NEEDED: Final = ("nixl_ep_cu12", "torch/include", "torch/share", "torch/test")
_NO_DOCUMENTS: Final = tuple(f"path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info"))


@dataclass(frozen=True, slots=True)
class Image:
    """What the emulator is given."""

    kernel: Path
    initramfs: Path
    disk: Path


def build(folder: Path, suite: str) -> Image:
    """The image, from the cache where nothing that it is made of has changed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time builds; the others find what it built
        return _build(folder, suite)


def _build(folder: Path, suite: str) -> Image:
    tree = _kernel(folder)
    version = next((tree / "lib" / "modules").iterdir()).name
    debian = _debian(folder, suite)
    name = _digest("image", version, debian.name, *_versions(), *(file.read_text() for file in sorted(GUEST.iterdir())))
    image = Image(tree / "boot" / f"vmlinuz-{version}", folder / f"{name}.cpio.gz", folder / f"{name}.img")
    if not image.disk.exists():
        _drop_older(folder)
        _initramfs(tree, version, image.initramfs, folder / "stage-initramfs")
        _disk(debian, tree, image.disk, folder / "stage")
    return image


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _drop_older(folder: Path) -> None:
    for old in (*folder.glob("*.img"), *folder.glob("*.cpio.gz")):
        old.unlink()


def _kernel(folder: Path) -> Path:
    """A stock Debian kernel, unpacked and not installed."""
    known = sorted(folder.glob("kernel-*"))
    if known:
        return known[-1]
    for package in KERNELS:
        depends = [line.split() for line in run("apt-cache", "depends", package).splitlines()]
        named = [words[1] for words in depends if len(words) == 2 and words[0] == "Depends:"]
        exact = next((name for name in named if name.startswith("linux-image-")), None)
        if exact is not None:
            break
    else:
        raise NoLabError(f"apt has none of the kernels {', '.join(KERNELS)}")
    download = folder / "download"
    shutil.rmtree(download, ignore_errors=True)
    download.mkdir()
    run("apt-get", "-o", "APT::Sandbox::User=root", "download", exact, cwd=download)
    unpacked = download / "tree"
    run("dpkg", "-x", str(next(download.glob("*.deb"))), str(unpacked))
    version = next((unpacked / "lib" / "modules").iterdir()).name
    run("depmod", "-b", str(unpacked), version)
    tree = folder / f"kernel-{version}"
    unpacked.rename(tree)
    shutil.rmtree(download)
    return tree


def _debian(folder: Path, suite: str) -> Path:
    """A small Debian with the RDMA tools."""
    tree = folder / f"debian-{_digest(suite, *DEBIAN_PACKAGES)}"
    if tree.exists():
        return tree
    part = folder / "debian.part"
    shutil.rmtree(part, ignore_errors=True)
    sources = folder / "sources.list"
    sources.write_text("".join(f"{source.line()}\n" for source in debian_sources()))
    without = [f"--dpkgopt={exclusion}" for exclusion in _NO_DOCUMENTS]
    included = f"--include={','.join(DEBIAN_PACKAGES)}"
    run("mmdebstrap", "--mode=root", "--variant=minbase", included, *without, suite, str(part), str(sources))
    part.rename(tree)
    return tree


def _distributions() -> dict[str, importlib.metadata.Distribution]:
    """The Python packages that go into the image: the named ones and whatever they need that is installed."""
    found: dict[str, importlib.metadata.Distribution] = {}
    wanted = list(PYTHON_PACKAGES)
    while wanted:
        name = wanted.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if name in PYTHON_PACKAGES:
                raise NoLabError(f"{name} is not installed here, and the lab's hosts need it") from None
            continue
        needed = [one for one in found[name].requires or [] if "extra ==" not in one]
        wanted += [_name_of(requirement) for requirement in needed]
    return found


def _name_of(requirement: str) -> str:
    end = next((at for at, letter in enumerate(requirement) if not (letter.isalnum() or letter in "-_.")), None)
    return requirement[:end]


def _versions() -> list[str]:
    return sorted(f"{name}=={found.version}" for name, found in _distributions().items())


def _initramfs(tree: Path, version: str, target: Path, stage: Path) -> None:
    shutil.rmtree(stage, ignore_errors=True)
    (stage / "modules").mkdir(parents=True)
    (stage / "bin").mkdir()
    order: list[str] = []
    for module in EARLY_MODULES:
        for line in run("modprobe", "-d", str(tree), "-S", version, "--show-depends", module).splitlines():
            kind, _, where = line.strip().partition(" ")
            if kind == "insmod" and Path(where).name.removesuffix(".xz") not in order:
                # Unpacked here: the small shell of the first moments need not know how.
                run("cp", where, str(stage / "modules"))
                if where.endswith(".xz"):
                    run("xz", "-d", "-f", str(stage / "modules" / Path(where).name))
                order.append(Path(where).name.removesuffix(".xz"))
    (stage / "modules" / "order").write_text("\n".join(order))
    busybox = shutil.which("busybox")
    assert busybox is not None
    shutil.copy(busybox, stage / "bin" / "busybox")
    (stage / "bin" / "sh").symlink_to("busybox")
    shutil.copy(GUEST / "initramfs.sh", stage / "init")
    (stage / "init").chmod(0o755)
    run("sh", "-c", f"find . | cpio --quiet -o -H newc | gzip -1 > {target}.part", cwd=stage)
    os.replace(f"{target}.part", target)
    shutil.rmtree(stage)


def _disk(debian: Path, kernel: Path, target: Path, stage: Path) -> None:
    shutil.rmtree(stage, ignore_errors=True)
    run("cp", "-al", str(debian), str(stage))
    modules = stage / "usr" / "lib" / "modules"
    modules.mkdir(parents=True, exist_ok=True)
    run("cp", "-al", *map(str, (kernel / "lib" / "modules").iterdir()), str(modules))
    lab = stage / "lab"
    lab.mkdir()
    for file in ("start.sh", "agent.py"):
        shutil.copy(GUEST / file, lab / file)
    packages = lab / "packages"
    packages.mkdir()
    for distribution in _distributions().values():
        _copy_package(distribution, packages)
    used = int(run("du", "-sm", str(stage)).split()[0])
    part = Path(f"{target}.part")
    part.unlink(missing_ok=True)
    size = f"{used + used // 8 + 64}M"
    run("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", str(stage), str(part), size)
    part.rename(target)
    shutil.rmtree(stage)


def _copy_package(distribution: importlib.metadata.Distribution, target: Path) -> None:
    """The folders of a package as they are installed here, with what is already compiled."""
    site = Path(sysconfig.get_path("purelib"))
    tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}
    for top in sorted(tops):
        if top in _NOT_NEEDED or top == "__pycache__" or (target / top).exists() or not (site / top).exists():
            continue
        run("cp", "-a", str(site / top), str(target))
    for name in _NOT_NEEDED:
        shutil.rmtree(target / name, ignore_errors=True)
