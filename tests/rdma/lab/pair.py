"""Two lab hosts, joined by a cable that ends in this machine: nothing of theirs leaves it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rdma.lab.image import Image
from rdma.lab.machine import BOOTS, LabError, Machine, accelerator, until

SOURCES: Final = Path(__file__).parents[3] / "src"
ADDRESSES: Final = (("12.12.12.43/24", "12.12.12.41/24"), ("12.12.12.44/24",))
"""Those of the report about a hang over ``grpc+verbs``: the first host is its server and its worker 1, the second one
its worker 0."""

_MEND: Final = (
    "tc qdisc del dev eth0 root 2>/dev/null; tc qdisc del dev eth0 clsact 2>/dev/null; ip link set eth0 up; true"
)
ENVIRONMENT: Final = "export PYTHONPATH=/lab/tree/src:/lab/packages OMP_NUM_THREADS=1; "
LOCKSTEP: Final = ENVIRONMENT + "exec python3 -m lockstep "


@dataclass(frozen=True, slots=True)
class Pair:
    """``first`` and ``second`` are hosts; ``boots`` counts how often they were switched on."""

    first: Machine
    second: Machine
    how: str

    folder: Path

    @property
    def boots(self) -> int:
        return self.first.boots + self.second.boots

    def mend(self) -> None:
        """End what still runs, and take every fault out of the network."""
        for machine in (self.first, self.second):
            if machine.running:
                machine.end_all()
                machine.run(_MEND, 30)

    def forget(self) -> None:
        """Remove the shared folders; the cache of images stays."""
        shutil.rmtree(self.folder, ignore_errors=True)


def start_pair(image: Image, folder: Path) -> Pair:
    """Both hosts, up. A boot that fails, as it now and then does under emulation, is tried again."""
    tree = _working_folder(folder)
    how = accelerator(image)
    cable = folder / "cable"
    names = ("first", "second")
    machines = [
        Machine(name, image, folder, addresses, _link(cable, number))
        for number, (name, addresses) in enumerate(zip(names, ADDRESSES, strict=True))
    ]
    pair = Pair(machines[0], machines[1], how, folder)
    for _ in range(BOOTS):
        cable.unlink(missing_ok=True)
        pair.first.power_on(tree, how)
        until(cable.exists, 20, "the first host has opened its end of the cable")
        pair.second.power_on(tree, how)
        if all(machine.wait_up() for machine in machines) and _see_each_other(pair):
            return pair
        stop_pair(pair)
    raise LabError(f"the lab's hosts did not come up in {BOOTS} tries:\n{machines[0].console()[-2000:]}")


def _see_each_other(pair: Pair) -> bool:
    return pair.first.run("ping -c 1 -w 10 12.12.12.44", 20).code == 0


def stop_pair(pair: Pair) -> None:
    for machine in (pair.first, pair.second):
        machine.power_off()


def _link(cable: Path, number: int) -> str:
    """One end of the cable; the first host listens at it. A large MTU lets RDMA use its largest, 4096."""
    role = "on" if number == 0 else "off"
    return (
        f"-netdev stream,id=n0,server={role},addr.type=unix,addr.path={cable} "
        f"-device virtio-net-pci,netdev=n0,romfile=,host_mtu=9000,mac=52:54:00:12:12:{number + 1:02x}"
    )


def _working_folder(folder: Path) -> Path:
    """This program as the hosts find it, compiled, since they are slow."""
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    shutil.copytree(SOURCES, tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    compile_all = [sys.executable, "-m", "compileall", "-q", str(tree / "src")]
    subprocess.run(compile_all, check=True, timeout=120)
    archive = folder / "tree.tar"
    subprocess.run(["tar", "-c", "-f", str(archive), "-C", str(tree), "."], check=True, timeout=120)
    return archive
