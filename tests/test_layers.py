"""Every package imports what its row allows and nothing else: other packages, rooms of its own, and libraries."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "lockstep"

BASE = {"drill_stubs", "errors", "foreign", "private_files", "terminal", "version"}
"""Single modules that any package may import; they import one another and nothing else of ours."""

LAYERS: dict[str, set[str]] = {
    "security": set(),
    "protocol": set(),
    "transports": {"protocol", "security"},
    "diagnose": {"protocol", "transports"},
    "flight": {"protocol", "diagnose"},
    "sim": {"protocol", "diagnose"},
    "runtime": {"protocol", "security", "transports", "diagnose"},
    "dashboard": {"protocol", "transports", "diagnose", "sim", "runtime"},
    "doctor": {"protocol", "security", "transports", "runtime"},
    "watch": {"protocol", "security", "diagnose", "flight", "runtime"},
    "drill": {"protocol", "security", "transports", "diagnose", "runtime"},
    "training": {"protocol", "security", "transports", "runtime"},
    "library": {"protocol", "security", "transports", "runtime", "training"},
    "integrations": {"library"},
    "ray": {"protocol", "transports", "runtime"},
    "benchmark": {"protocol", "runtime", "security", "training"},
    "cli": {
        "protocol",
        "security",
        "transports",
        "diagnose",
        "flight",
        "sim",
        "runtime",
        "dashboard",
        "doctor",
        "drill",
        "watch",
        "training",
        "library",
        "benchmark",
    },
    "__init__": {"cli", "library", "runtime"},
    "__main__": {"cli"},
}

LIBRARIES: dict[str, set[str]] = {
    "security": {"cryptography"},
    "protocol": set(),
    "transports": {"google", "grpc", "grpc_tools", "nixl", "numpy", "psutil"},
    "diagnose": set(),
    "flight": set(),
    "sim": set(),
    "runtime": {"psutil"},
    "dashboard": set(),
    "doctor": set(),
    "drill": set(),
    "watch": {"torch"},
    "training": {"safetensors", "torch"},
    "library": {"numpy", "safetensors", "torch"},
    "integrations": {"lightning", "torch"},
    "ray": {"ray"},
    "benchmark": {
        *("PIL", "cv2", "google", "google_crc32c", "numpy", "psutil", "safetensors", "simplejpeg"),
        *("tensorboard", "timm", "torch", "torchvision"),
    },
    "cli": {"matplotlib", "rich", "torch"},
    "__init__": set(),
    "__main__": set(),
}
"""What is not of the standard library. The package that a library belongs to is the only one that knows it."""

STANDARD: dict[str, set[str]] = {
    "protocol": {
        *(
            "__future__",
            "collections",
            "dataclasses",
            "enum",
            "functools",
            "hashlib",
            "itertools",
            "json",
            "math",
            "re",
        ),
        *("types", "typing"),
    },
    "sim": {
        *("concurrent", "contextlib", "gc", "heapq", "multiprocessing", "random", "zlib"),
    },
}
"""Pure packages: no clock, no socket, no file. The simulator may use what the protocol may, and these: its random
numbers are seeded, and the processes play whole runs side by side."""

ROOMS: dict[str, set[str]] = {
    "protocol/core": set(),
    "protocol/worker": {"core"},
    "protocol/server": {"core"},
    "protocol/coordinator": {"core"},
    "runtime/checkpoint": set(),
    "runtime/trace": set(),
    "runtime/startup": set(),
    "runtime/monitor": {"startup"},
    "runtime/local_cluster": {"monitor", "startup"},
    "runtime/watch": {"startup", "task", "trace"},
    "runtime/task": {"checkpoint", "monitor", "startup", "trace", "watch"},
    "transports/control": set(),
    "transports/stream": {"control"},
    "transports/grpc": {"control", "stream"},
    "transports/shm": {"control"},
    "transports/tcp": {"control"},
    "transports/ucx": {"control", "stream"},
    "transports/verbs": {"control", "stream", "ucx"},
    "transports/auto": {"control", "grpc", "shm", "tcp", "verbs"},
    "training/gpu": set(),
    "training/worker": {"gpu"},
    "training/server": {"gpu"},
    "training/ranks": {"server", "worker"},
    "benchmark/models": set(),
    "benchmark/data": set(),
    "benchmark/settings": {"data", "models"},
}
"""Which other rooms of its own package a room may import. Modules of the package itself are open to all."""


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in the file, except for type checking only."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files_of(package: str) -> list[Path]:
    single = SOURCES / f"{package}.py"
    return [single] if single.exists() else sorted((SOURCES / package).rglob("*.py"))


def is_there(module: str) -> bool:
    path = SOURCES.parent.joinpath(*module.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def test_every_package_has_its_row() -> None:
    found = {
        p.stem if p.is_file() else p.name
        for p in SOURCES.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert found == LAYERS.keys() | BASE
    assert LIBRARIES.keys() == LAYERS.keys()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_what_lies_below_it_only(layer: str) -> None:
    for file in files_of(layer):
        for name in imports(file):
            if not name.startswith("lockstep."):
                continue
            package = name.split(".")[1]
            assert package in LAYERS[layer] | BASE | {layer}, f"{file.relative_to(SOURCES)} imports {name}"


@pytest.mark.parametrize("module", sorted(BASE))
def test_a_base_module_imports_base_modules_only(module: str) -> None:
    for name in imports(SOURCES / f"{module}.py"):
        top, _, rest = name.partition(".")
        assert rest.split(".")[0] in BASE if top == "lockstep" else top in sys.stdlib_module_names, name


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_knows_its_own_libraries_only(layer: str) -> None:
    for file in files_of(layer):
        for name in imports(file):
            top = name.split(".")[0]
            if top == "lockstep" or (top in sys.stdlib_module_names and layer not in STANDARD):
                continue
            allowed = (
                LIBRARIES[layer] | STANDARD.get(layer, set()) | (STANDARD["protocol"] if layer == "sim" else set())
            )
            assert top in allowed, f"{file.relative_to(SOURCES)} imports {name}"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_its_neighbours_in_one_direction(room: str) -> None:
    package, own = room.split("/")
    for file in files_of(room):
        for name in imports(file):
            parts = name.split(".")
            if parts[:2] != ["lockstep", package] or len(parts) < 4 or not is_there(".".join(parts[:4])):
                continue
            assert parts[2] in ROOMS[room] | {own}, f"{file.relative_to(SOURCES)} imports {name}"


def test_the_rules_of_the_doctor_touch_no_machine() -> None:
    touching = {"socket", "subprocess", "threading", "time", "os", "shutil", "resource"}
    pure = [*(SOURCES / "doctor").glob("rules_*.py"), *(SOURCES / "doctor" / f"{n}.py" for n in ("analysis", "facts"))]
    for file in pure:
        assert touching.isdisjoint(name.split(".")[0] for name in imports(file)), file.name


def test_what_runs_inside_a_watched_rank_needs_torch_only() -> None:
    for file in ("injected.py", "drill_program.py"):
        for name in imports(SOURCES / "watch" / file):
            assert name.split(".")[0] in sys.stdlib_module_names | {"torch"}, name


def test_only_what_runs_inside_a_watched_rank_imports_torch() -> None:
    inside = ("injected.py", "drill_program.py")
    for file in files_of("watch"):
        assert file.name in inside or "torch" not in {name.split(".")[0] for name in imports(file)}, file.name


def test_the_judgement_of_a_watched_job_touches_no_machine() -> None:
    touching = {"socket", "subprocess", "threading", "time", "os", "shutil", "pathlib"}
    for name in ("judging", "late_clock", "naming", "sights", "standstill", "straggling"):
        assert touching.isdisjoint(top.split(".")[0] for top in imports(SOURCES / "watch" / f"{name}.py")), name


def test_the_analysis_of_recordings_touches_no_machine() -> None:
    touching = {"socket", "subprocess", "threading", "time", "os", "shutil", "resource", "pathlib"}
    for name in ("account", "analysis", "diagnosis", "groups", "recording", "signature"):
        assert touching.isdisjoint(top.split(".")[0] for top in imports(SOURCES / "flight" / f"{name}.py")), name
