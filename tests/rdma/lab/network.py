"""Three lab hosts, joined by cables that end in this machine: nothing of theirs leaves it."""

from __future__ import annotations

import importlib.util
import io
import marshal
import socket
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from rdma.lab.image import Image
from rdma.lab.machine import BOOTS, LabError, Machine, accelerator

TREE: Final = Path(__file__).parents[3]
SHIPPED: Final = ("src", "tests/conformance_hosts")
"""The folders of this tree that the hosts get; none of them needs pytest."""
ADDRESSES: Final = (("first", "12.12.12.43"), ("second", "12.12.12.44"), ("third", "12.12.12.41"))
"""Those of the report about a hang over ``grpc+verbs``: its server, its worker 0, its worker 1."""

_LAY_WIRE: Final = "tc qdisc add dev eth0 clsact && tc qdisc add dev eth0 root netem"
"""A wire that faults can be put on and taken off while it is used. To add or delete a queueing discipline stops a card
for a moment, and a Soft-RoCE device whose packet is refused in that moment gives up its queue pair; where that is UCX's
own, for datagrams, UCX ends the process."""
WHOLE_WIRE: Final = "tc qdisc change dev eth0 root netem loss 0% corrupt 0% rate 0bit"
"""Each fault by its name: one that a change does not mention stays."""
LET_ALL_IN: Final = "tc filter del dev eth0 ingress"
_MEND: Final = f"{WHOLE_WIRE}; {LET_ALL_IN}; tc filter del dev eth0 egress; ip link set eth0 up; true"
ENVIRONMENT: Final = (
    "export PYTHONPATH=/lab/tree/src:/lab/tree/tests:/lab/packages OMP_NUM_THREADS=1 LOCKSTEP_KEY_FILE=/lab/key; "
)
LOCKSTEP: Final = ENVIRONMENT + "exec python3 -m lockstep "


@dataclass(frozen=True, slots=True)
class Lab:
    """Its hosts; ``boots`` counts how often they were switched on."""

    first: Machine
    second: Machine
    third: Machine
    how: str

    @property
    def hosts(self) -> tuple[Machine, Machine, Machine]:
        return (self.first, self.second, self.third)

    @property
    def boots(self) -> int:
        return sum(machine.boots for machine in self.hosts)

    def mend(self) -> None:
        """End what still runs, and take every fault out of the network."""
        for machine in self.hosts:
            if machine.running:
                machine.end_all()
                machine.run(_MEND, 30)


def start_lab(image: Image, logs: Path) -> Lab:
    """All hosts, up. A boot that fails, as it now and then does under emulation, is tried again."""
    logs.mkdir(parents=True, exist_ok=True)
    how = accelerator(image)
    machines = [Machine(name, image, address, logs / f"{name}.console") for name, address in ADDRESSES]
    lab = Lab(machines[0], machines[1], machines[2], how)
    with working_folder() as tree:
        for _ in range(BOOTS):
            _plug_in(lab, tree.fileno())
            if all(machine.wait_up() for machine in machines) and _see_each_other(lab):
                for machine in machines:
                    machine.run(_LAY_WIRE, 20).ok()
                return lab
            stop_lab(lab)
    raise LabError(f"the lab's hosts did not come up in {BOOTS} tries:\n{machines[0].console()[-2000:]}")


def _plug_in(lab: Lab, tree: int) -> None:
    """Switch all on. A cable leads from each of the others to the first, which joins them."""
    cables = [socket.socketpair() for _ in lab.hosts[1:]]
    near = [one.fileno() for one, _ in cables]
    cards = [word for number, end in enumerate(near) for word in _card(end, f"n{number}", number)]
    lab.first.power_on(tree, cards, near, lab.how)
    for number, (machine, (_, other)) in enumerate(zip(lab.hosts[1:], cables, strict=True), len(cables)):
        machine.power_on(tree, _card(other.fileno(), "n0", number), [other.fileno()], lab.how)
    for one, other in cables:
        one.close()
        other.close()


def _see_each_other(lab: Lab) -> bool:
    others = " && ".join(f"ping -c 1 -w 10 {address}" for _, address in ADDRESSES[1:])
    return lab.first.run(others, 40).code == 0


def stop_lab(lab: Lab) -> None:
    for machine in lab.hosts:
        machine.power_off()


def _card(cable: int, name: str, number: int) -> list[str]:
    """A network card at one end of a cable. A large MTU lets RDMA use its largest, 4096."""
    return [
        "-netdev",
        f"stream,id={name},server=off,addr.type=fd,addr.str={cable}",
        "-device",
        f"virtio-net-pci,netdev={name},romfile=,host_mtu=9000,mac=52:54:00:12:12:{number + 1:02x}",
    ]


def working_folder() -> IO[bytes]:
    """An archive of this program as the hosts find it, compiled, since they are slow; a file without a name."""
    archive = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in sorted(path for folder in SHIPPED for path in (TREE / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                name = str(path.relative_to(TREE))
                _add(tar, name, path.read_bytes())
                if path.suffix == ".py":
                    _add(tar, importlib.util.cache_from_source(name), _compiled(path, f"/lab/tree/{name}"))
    archive.flush()
    return archive


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _compiled(path: Path, name: str) -> bytes:
    """What Python keeps of a module: it fits a source of this size and of the time that archives give, 0."""
    source = path.read_bytes()
    head = importlib.util.MAGIC_NUMBER + bytes(4) + bytes(4) + len(source).to_bytes(4, "little")
    return head + marshal.dumps(compile(source, name, "exec", dont_inherit=True))
