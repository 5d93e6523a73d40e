"""The samples that let only a job's own hosts in: they are valid, and open the ports that docs/security.md names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lockstep.transports.control.ports import parse_ports

ROOT = Path(__file__).resolve().parents[2]
FIREWALL, POLICY = ROOT / "examples" / "firewall.nft", ROOT / "examples" / "network-policy.json"
LISTED, RANGE = 2222, parse_ports("4700-4799")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("nft") is None, reason="needs root and nftables")
def test_nftables_takes_the_rules() -> None:
    ran = subprocess.run(["nft", "-c", "-f", str(FIREWALL)], capture_output=True, text=True, timeout=20, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_firewall_lets_the_hosts_of_the_job_in_and_drops_all_others() -> None:
    rules = [line.strip() for line in FIREWALL.read_text().splitlines()]
    ports = f"tcp dport {{ {LISTED}, {RANGE} }}"
    assert rules.index(f"{ports} ip saddr @hosts accept") < rules.index(f"{ports} drop")


def test_the_policy_admits_the_pods_of_the_job_to_its_ports_only() -> None:
    spec = json.loads(POLICY.read_text())["spec"]
    (rule,) = spec["ingress"]
    assert rule["from"] == [{"podSelector": spec["podSelector"]}]
    assert rule["ports"] == [
        {"protocol": "TCP", "port": LISTED},
        {"protocol": "TCP", "port": RANGE.first, "endPort": RANGE.last},
    ]


def test_the_page_shows_the_same_ports() -> None:
    page = (ROOT / "docs" / "security.md").read_text()
    assert f"both for `--ports={RANGE}` and port {LISTED} in the host lists" in page
    assert all(f"examples/{sample.name}" in page for sample in (FIREWALL, POLICY))
