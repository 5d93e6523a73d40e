"""Drawn clusters and networks, for properties that must hold in all of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from lockstep.protocol.core.messages import ParameterEntry
from lockstep.sim.scenario import Mode, NetworkProfile, Scenario, SecondsRange, TrainingProfile

TINY = (ParameterEntry("only", 4, "float32", 0),)
EMPTY_TENSORS = (ParameterEntry("nothing", 0, "float32", 0), ParameterEntry("void", 0, "float64", 1))
CUT = (ParameterEntry("bias", 3, "float32", 0), ParameterEntry("weight", 70, "float32", 0))
TWO_GROUPS = tuple(ParameterEntry(f"p{i}", 16, "float32", i % 2) for i in range(6))

models = st.sampled_from([CUT, TWO_GROUPS, TINY, EMPTY_TENSORS, ()])


def chances(*values: float) -> st.SearchStrategy[float]:
    """Mostly nothing, sometimes a lot."""
    return st.sampled_from([0.0, *values])


networks = st.builds(
    NetworkProfile,
    latency=st.sampled_from([SecondsRange(0.0001, 0.01), SecondsRange(0.0, 0.5)]),
    late_chance=chances(0.02, 0.1),
    in_order=st.booleans(),
    duplicate_chance=chances(0.1, 0.3),
    reset_chance=chances(0.005, 0.03),
    reopen=st.sampled_from([SecondsRange(0.01, 0.1), SecondsRange(0.01, 3.0)]),
    transfer_failure_chance=chances(0.05),
    ghost_chance=chances(0.1),
    lent_in_place=st.booleans(),
    quiet_after=st.sampled_from([20.0, 60.0]),
)

trainings = st.builds(
    TrainingProfile,
    steps=st.integers(0, 5),
    backward=st.sampled_from([SecondsRange(0.0, 0.02), SecondsRange(0.0, 1.0)]),
    apply=st.sampled_from([SecondsRange(0.0, 0.02), SecondsRange(0.0, 1.0)]),
    absent_chance=chances(0.2),
    edit_chance=chances(0.5),
    withdraw_chance=chances(0.2),
    void_chance=chances(0.2),
    rates_at_seal=st.booleans(),
)


@st.composite
def backup_clusters(draw: st.DrawFn) -> Scenario:
    """Steps are made by the first so many workers that seal them."""
    scenario = draw(clusters(Mode.SEALED))
    workers = draw(st.integers(2, 4))
    return replace(scenario, workers=workers, aggregate=draw(st.integers(1, workers - 1)))


def clusters(*modes: Mode) -> st.SearchStrategy[Scenario]:
    return st.builds(
        Scenario,
        seed=st.integers(0, 2**32),
        servers=st.integers(1, 3),
        workers=st.integers(1, 3),
        mode=st.sampled_from(modes),
        parameters=models,
        network=networks,
        training=trainings,
        start=st.sampled_from([SecondsRange(0.0, 0.0), SecondsRange(0.0, 30.0)]),
    )
