"""Every flag of ``lockstep bench``: those of tf_cnn_benchmarks, each accounted for, and our own.

Parsing, help, ``docs/flags.md`` and the tests all read this one table.
"""

from __future__ import annotations

from lockstep.cli.flags.flag import Flag
from lockstep.cli.flags.table.cluster import CLUSTER_FLAGS, EXCHANGE_FLAGS
from lockstep.cli.flags.table.features import DATA_FLAGS, EVALUATION_FLAGS, PRECISION_FLAGS
from lockstep.cli.flags.table.output import OUTPUT_FLAGS
from lockstep.cli.flags.table.run import DEVICE_FLAGS, OPTIMIZER_FLAGS, RUN_FLAGS
from lockstep.cli.flags.table.tensorflow import OLDER_FLAGS, TENSORFLOW_FLAGS

TABLE: tuple[Flag, ...] = (
    *CLUSTER_FLAGS,
    *EXCHANGE_FLAGS,
    *RUN_FLAGS,
    *DEVICE_FLAGS,
    *OPTIMIZER_FLAGS,
    *OUTPUT_FLAGS,
    *DATA_FLAGS,
    *EVALUATION_FLAGS,
    *PRECISION_FLAGS,
    *TENSORFLOW_FLAGS,
    *OLDER_FLAGS,
)

EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("num_batches", "num_epochs"),
    ("save_model_secs", "save_model_steps"),
    (
        "eval_during_training_every_n_steps",
        "eval_during_training_every_n_epochs",
        "eval_during_training_at_specified_steps",
        "eval_during_training_at_specified_epochs",
    ),
)
"""Groups of flags of which a run accepts at most one."""
