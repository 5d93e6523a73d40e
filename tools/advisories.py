"""The part of ``make audit`` that needs the network: known advisories about the locked versions, from pip-audit.

Exit code 0 if every package was looked up and none has an advisory, 1 if one has, 3 if they could not be looked up.

  python -m tools.advisories
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tools.lock import LOCKS
from tools.throwaway import installed

PIP_AUDIT = "pip-audit==2.10.1"


def main() -> int:
    with installed(PIP_AUDIT) as programs:
        said = [_audited(str(programs / "pip-audit"), f"{LOCKS / name}.txt") for name in ("packages", "torch")]
    unknown = [one["name"] for packages in said for one in packages if "skip_reason" in one]
    found = [
        (one["name"], one["version"], each) for packages in said for one in packages for each in one.get("vulns", [])
    ]
    for name, version, advisory in found:
        fixed = ", ".join(advisory.get("fix_versions", [])) or "no version yet"
        print(f"{name} {version}: {advisory['id']}, fixed in {fixed}")
    checked = sum(map(len, said)) - len(unknown)
    print(f"{checked} package(s) looked up, {len(found)} advisory(ies)")
    if unknown or not checked:
        print(
            f"{len(unknown)} could not be looked up. pip-audit asks the package index's JSON interface, which a mirror "
            "may lack; run 'make audit' where that can be reached."
        )
    return 1 if found else 3 if unknown or not checked else 0


def _audited(program: str, path: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [program, "--disable-pip", "--require-hashes", "--progress-spinner=off", "--format=json", "-r", path],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except ValueError:
        print(done.stderr[-2000:], file=sys.stderr)
        return []
    return packages


if __name__ == "__main__":
    sys.exit(main())
