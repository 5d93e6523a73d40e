"""Where to listen when an engine gives tasks names that come later than the tasks, or lead to a former one for a while.

A name in Kubernetes resolves only when its pod runs (where a readiness probe asks the task, only when that listens),
and after a pod has come back with another address it may lead to the old one for as long as it is cached. Waiting for
the own name would be waiting for oneself: the task listens at its machine's address, and the others wait for the name.
"""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Callable, Mapping

from lockstep.runtime.startup import tf_config
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.transports.control.addresses import (
    AddressError,
    interface_addresses,
    main_address,
    parse_address,
    resolve,
)
from lockstep.transports.control.host_names import listed_address

POD_VARIABLE = "KUBERNETES_SERVICE_HOST"
"""The kubelet sets it in every container."""


def with_own_address(
    spec: ClusterSpec, environ: Mapping[str, str], say: Callable[[str], None] = lambda _: None
) -> ClusterSpec:
    """The cluster, with ``bind`` where the own name does not lead to this machine and an engine has given it."""
    if spec.task is None or spec.bind is not None or not spec.hosts_of(spec.task.role)[spec.task.index :]:
        return spec
    if environ.get(POD_VARIABLE, "") == "" and environ.get(tf_config.VARIABLE, "") == "":
        return spec
    try:
        own = parse_address(spec.address_of(spec.task))
    except AddressError:
        return spec  # the rules of the lists have a sentence about it
    if (listed := listed_address(own.host)) is not None:
        return dataclasses.replace(spec, bind=listed)
    if own.literal is not None or own.host.lower() == "localhost" or _leads_here(own.host):
        return spec
    here = machine_address()
    say(f"{own.host}, the name of {spec.task.short}, does not lead here yet; it listens at {here} until others find it")
    return dataclasses.replace(spec, bind=here)


def machine_address() -> str:
    """Where others reach this machine: by its default route, or without one, at its first address besides loopback."""
    main = main_address()
    if not ipaddress.ip_address(main).is_loopback:
        return main
    others = [address for address in interface_addresses() if not (address.is_loopback or address.is_link_local)]
    return str(min(others, key=lambda address: (address.version, int(address)), default=main))


def _leads_here(name: str) -> bool:
    try:
        return not interface_addresses().isdisjoint(resolve(name))
    except AddressError:
        return False
