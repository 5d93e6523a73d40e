"""What Lockstep expects of torch's private names: one test for each, so that a new torch says which of them changed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.training import torch_private as private

SOURCES = Path(__file__).parents[2] / "src" / "lockstep"
HERE = SOURCES / "training" / "torch_private.py"

OURS_ELSEWHERE = {
    *("_exit", "_getframe", "_current_frames", "_register_atexit", "_run_module_as_main", "_Environ"),  # Python's own
    "_replace",  # of a named tuple
    *("_optimizers", "_models"),  # accelerate's
}


def test_norms_and_copies_of_lists() -> None:
    first, second = torch.tensor([3.0, 4.0]), torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    assert [float(norm) for norm in private.foreach_norm([first], 2)] == [5.0]
    assert [norm.dtype for norm in private.foreach_norm([second], 1, dtype=torch.float32)] == [torch.float32]
    assert float(private.foreach_norm([first], float("inf"))[0]) == 4.0
    places = [torch.zeros(2), torch.zeros(2)]
    private.foreach_copy_(places, [first, first + 1])
    assert [place.tolist() for place in places] == [[3.0, 4.0], [4.0, 5.0]]
    private.foreach_add_(places, 1)
    assert [place.tolist() for place in places] == [[4.0, 5.0], [5.0, 6.0]]


@pytest.mark.parametrize(
    ("kernel", "kind"), [(private.fused_adam_, torch.optim.Adam), (private.fused_adamw_, torch.optim.AdamW)]
)
def test_fused_kernels_do_what_the_optimizer_does(kernel: Callable[..., None], kind: type[torch.optim.Adam]) -> None:
    values, gradient = torch.linspace(-1, 1, 64), torch.linspace(1, 2, 64)
    parameter = nn.Parameter(values.clone())
    parameter.grad = gradient.clone()
    kind([parameter], lr=0.1, weight_decay=0.01, fused=True).step()
    numbers: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    rest: dict[str, Any] = {"amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None}
    first, second, step = torch.zeros(64), torch.zeros(64), torch.tensor(1.0)
    kernel([values], [gradient], [first], [second], [], [step], **numbers, **rest)
    assert torch.equal(values, parameter.detach())


def test_onednn_makes_products_of_matrices_in_either_order() -> None:
    given, weight, bias = torch.randn(3, 70), torch.randn(65, 70), torch.randn(65)
    torch.testing.assert_close(private.onednn_product(given, weight, bias), given @ weight.t() + bias)
    back = torch.randn(3, 65)
    torch.testing.assert_close(private.onednn_product(back, weight.t(), None), back @ weight)


def test_every_batch_norm_is_one() -> None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    assert all(issubclass(kind, private.BatchNorm) for kind in kinds)
    assert not issubclass(nn.LayerNorm, private.BatchNorm)


class _Marked(Tensor):
    pass


def test_a_subclass_shares_the_memory() -> None:
    plain = torch.zeros(())
    made = private.subclass_of(_Marked, plain)
    assert type(made) is _Marked
    plain.fill_(2)
    assert float(made) == 2


def test_changes_are_counted() -> None:
    tensor = torch.zeros(3)
    before = private.changes_of(tensor)
    tensor.add_(1)
    assert private.changes_of(tensor) == before + 1
    assert private.changes_of(tensor + 1) == 0


def test_hooks_on_gradients_are_seen() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert not private.has_gradient_hooks(parameter)
    parameter.register_hook(lambda gradient: gradient)
    assert private.has_gradient_hooks(parameter)


def test_attributes_of_tensors_are_those_that_calls_are_reported_with() -> None:
    found = private.attributes_of_tensors()
    assert {"grad", "data", "shape", "dtype", "device", "requires_grad"} <= found.keys()
    seen: list[object] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        _ = torch.zeros(1).grad
    assert found["grad"].__get__ in seen


def test_the_end_of_backward_is_told_once_the_graph_is_done() -> None:
    told: list[bool] = []
    weight = torch.ones(1, requires_grad=True)
    inside: list[object] = []

    def on_gradient(gradient: Tensor) -> None:
        inside.append(private.current_autograd_node())
        private.at_end_of_backward(lambda: told.append(weight.grad is not None))

    weight.register_hook(on_gradient)
    (weight * 2).backward()
    assert told == [True]
    assert inside[0] is not None
    assert private.current_autograd_node() is None


def test_modes_come_off_and_go_on_in_their_order() -> None:
    class Quiet(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Quiet() as lower, Quiet() as upper:
        taken = private.all_modes_taken_off()
        assert private.all_modes_taken_off() == []
        private.put_modes_on(taken)
        assert taken[-2:] == [lower, upper]


def test_the_mode_of_a_default_device_is_found() -> None:
    assert private.default_device_mode() is None
    torch.set_default_device("cpu")
    try:
        mode = private.default_device_mode()
        assert isinstance(mode, TorchFunctionMode)
        taken = private.all_modes_taken_off()
        private.put_modes_on(taken)
        assert taken[0] is mode
    finally:
        torch.set_default_device(None)


def test_a_scheduler_believes_that_a_step_was_made() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    private.mark_as_stepped(optimizer)
    scheduler.step()  # a warning, which is an error here, if it does not


def test_a_step_that_says_it_is_wrapped_is_left_alone_by_schedulers() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

        private.mark_as_wrapped_by_scheduler(step)

    optimizer = Own([nn.Parameter(torch.zeros(1))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" not in vars(optimizer)


def test_a_new_class_gets_the_wrapper_that_calls_hooks() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    optimizer.__class__ = Own
    private.rewrap_step(optimizer)
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    optimizer.step()
    assert called


COMPILER = """
import torch
from lockstep.training import torch_private as private
assert not private.compiler_is_loaded() and private.compiler_callbacks() is None and not private.has_compiled()
import inspect
for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    private.keep_from_compiler(inspect.unwrap(getattr(torch.optim.Optimizer, name)))
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).state_dict()
assert not private.compiler_is_loaded(), "an optimizer imports the compiler again"
private.allow_variants(77)
assert private.compiler_is_loaded() and torch._dynamo.config.recompile_limit >= 77
private.allow_variants(3)
assert torch._dynamo.config.recompile_limit >= 77
private.load_compiler()
assert not private.has_compiled()
told = []
import torch._dynamo.callback
private.compiler_callbacks().register_start_callback(lambda *given: told.append(given))
def double(x):
    return x * 2
assert torch.compile(double, backend="eager")(torch.ones(1)).item() == 2
assert told and private.has_compiled()
"""


@pytest.mark.timeout(120)
def test_the_compiler_is_kept_out_and_seen_when_it_comes() -> None:
    """In a process of its own: whether the compiler is loaded is a fact about a process."""
    done = subprocess.run([sys.executable, "-c", COMPILER], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_stores_and_gloo_take_what_we_give_them() -> None:
    store = private.c10d.PrefixStore("a", private.c10d.HashStore())
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert issubclass(private.c10d.TCPStore, private.c10d.Store)
    devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1") for _ in range(2)]
    group: Any = dist.ProcessGroupGloo(store, 0, 1, private.gloo_options(devices, timedelta(seconds=5)))
    tensors = [torch.full((2,), float(number)) for number in range(3)]
    for work in [group.allreduce([tensor]) for tensor in tensors]:
        work.wait()
    assert [tensor.tolist() for tensor in tensors] == [[0, 0], [1, 1], [2, 2]]


def test_trees_are_mapped() -> None:
    assert private.tree_map(lambda leaf: leaf + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}


def test_torch_functions_of_a_subclass_are_off_where_asked() -> None:
    with private.DisableTorchFunctionSubclass():
        assert float(private.subclass_of(_Marked, torch.ones(())) + 1) == 2


def test_every_name_has_a_test() -> None:
    text = Path(__file__).read_text()
    assert [name for name in private.__all__ if f"private.{name}" not in text] == []


# -- nobody else uses private names --


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def foreign_private_names(file: Path, own: frozenset[str]) -> Iterator[str]:
    """Private names that a file uses and none of ours defines."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if any(map(_private, alias.name.split("."))))
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("lockstep"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (f"{node.module}: {name}" for name in names if _private(name))
        elif isinstance(node, ast.Attribute) and _private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")) and node.attr not in own:
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch._"):
            yield node.value


def _defined(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            for target in [part for one in targets for part in ast.walk(one)]:
                if isinstance(target, ast.Attribute):
                    yield target.attr
                elif isinstance(target, ast.Name):
                    yield target.id


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    # What runs where Lockstep is not installed.
    inside = {SOURCES / "watch" / name for name in ("injected.py", "drill_program.py")}
    files = [file for file in sorted(SOURCES.rglob("*.py")) if file != HERE and file not in inside]
    torchs = set(foreign_private_names(HERE, frozenset()))
    own = frozenset(name for file in files for name in _defined(file) if _private(name)) - torchs
    used = {str(file.relative_to(SOURCES)): set(foreign_private_names(file, own)) - OURS_ELSEWHERE for file in files}
    assert {file: names for file, names in used.items() if names} == {}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import torch._inductor", "torch._inductor"),
        ("from torch._C import Node", "torch._C: _C"),
        ("norms = torch._foreach_norm([])", "_foreach_norm"),
        ("count = tensor._version", "_version"),
        ("known = sys.modules.get('torch._dynamo')", "torch._dynamo"),
    ],
)
def test_private_names_are_noticed(line: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert name in set(foreign_private_names(tmp_path / "module.py", frozenset()))
