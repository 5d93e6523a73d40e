"""Flags about what is trained, for how long, where, and with which optimizer."""

from __future__ import annotations

from lockstep.benchmark.settings.config import (
    DATA_FORMATS,
    DEVICES,
    OPTIMIZERS,
    BenchConfig,
    DeviceConfig,
    OptimizerConfig,
    RunLength,
)
from lockstep.cli.flags.flag import Flag, FlagKind, Group, Rows
from lockstep.protocol.core.endings import ON_NAN_PARAMETERS

_BENCH = BenchConfig()
_LENGTH = RunLength()
_DEVICE = DeviceConfig()
_RATES = OptimizerConfig()
_RUN = Rows(Group.RUN)
_DEVICES = Rows(Group.DEVICES)
_OPTIMIZER = Rows(Group.OPTIMIZER)

_ONE_DEVICE = "a worker uses the first --num_gpus devices; choose them with the variable CUDA_VISIBLE_DEVICES."

RUN_FLAGS: tuple[Flag, ...] = (
    _RUN.works(
        "model", FlagKind.TEXT, _BENCH.model, "trivial, lenet, alexnet, vgg16, resnet50, inception3, seq2seq and others"
    ),
    _RUN.works("batch_size", FlagKind.WHOLE, _LENGTH.batch_size, "images per step and device; 0: the model's default"),
    _RUN.works("num_batches", FlagKind.WHOLE, _LENGTH.num_batches, "timed steps"),
    _RUN.works("num_warmup_batches", FlagKind.WHOLE, _LENGTH.num_warmup_batches, "steps before timing starts"),
    _RUN.works("seed", FlagKind.WHOLE, _BENCH.seed, "seed of the initial parameters and the data", upstream=False),
    _RUN.works("tf_random_seed", FlagKind.WHOLE, _BENCH.seed, "another name for --seed", same_as="seed"),
    _RUN.works(
        "num_epochs", FlagKind.NUMBER, None, "number of timed passes over the data set, instead of --num_batches"
    ),
    _RUN.works(
        "on_nan_parameters",
        FlagKind.CHOICE,
        _BENCH.on_nan_parameters,
        "when a parameter contains NaN or infinity: end the run, naming the first, or report it and continue",
        choices=ON_NAN_PARAMETERS,
        upstream=False,
    ),
    _RUN.notice(
        "autotune_threshold",
        FlagKind.WHOLE,
        None,
        "trials of TensorFlow's autotuner, which also lengthen its warm-up",
        "PyTorch tunes its kernels by itself; give --num_warmup_batches for a longer warm-up.",
    ),
    _RUN.notice(
        "batch_group_size",
        FlagKind.WHOLE,
        1,
        "batches that the input pipeline prepares at once",
        "synthetic data needs no preparation.",
    ),
)

DEVICE_FLAGS: tuple[Flag, ...] = (
    _DEVICES.works(
        "device", FlagKind.CHOICE, _DEVICE.device, "auto: a GPU if there is one, else the CPU", choices=DEVICES
    ),
    _DEVICES.works("num_gpus", FlagKind.WHOLE, _DEVICE.num_gpus, "devices per worker; servers ignore it"),
    _DEVICES.works(
        "data_format",
        FlagKind.CHOICE,
        _DEVICE.data_format,
        "order of an image's dimensions in memory",
        choices=DATA_FORMATS,
    ),
    _DEVICES.works(
        "num_threads",
        FlagKind.WHOLE,
        _DEVICE.num_threads,
        "CPU threads per task; with 1, a server's updates also use idle cores",
        upstream=False,
    ),
    _DEVICES.works(
        "num_intra_threads",
        FlagKind.WHOLE,
        _DEVICE.num_threads,
        "another name for --num_threads",
        same_as="num_threads",
    ),
    _DEVICES.works(
        "mps",
        FlagKind.SWITCH,
        _DEVICE.mps,
        "run NVIDIA's MPS for --ps and --workers on one GPU, so that they need not take turns",
        upstream=False,
    ),
    _DEVICES.works(
        "deterministic",
        FlagKind.SWITCH,
        _DEVICE.deterministic,
        "use only kernels that produce the same bits every time; slower on a GPU",
        upstream=False,
    ),
    _DEVICES.works(
        "compile",
        FlagKind.SWITCH,
        _DEVICE.compile,
        "compile the model with torch.compile, in stages, so that gradients leave before backward ends",
        upstream=False,
    ),
    _DEVICES.refused("gpu_indices", FlagKind.TEXT, "", "which GPUs to use, in which order", _ONE_DEVICE),
    _DEVICES.refused(
        "gpu_memory_frac_for_testing",
        FlagKind.NUMBER,
        0.0,
        "use only this fraction of the GPU's memory",
        "GPU memory is not limited here; leave it out.",
    ),
    _DEVICES.refused(
        "use_unified_memory",
        FlagKind.SWITCH,
        None,
        "let a model be larger than the GPU's memory",
        "PyTorch keeps a model in GPU memory; leave it out and use a smaller --batch_size.",
    ),
    _DEVICES.notice(
        "use_numa_affinity",
        FlagKind.SWITCH,
        False,
        "keep a process near its GPU's memory",
        "Lockstep does not bind tasks to NUMA nodes; start them under numactl to do that.",
    ),
)

_MOMENTUM = ("optimizer", ("momentum",))
_RMSPROP = ("optimizer", ("rmsprop",))
_ADAM = ("optimizer", ("adam", "adamw"))

OPTIMIZER_FLAGS: tuple[Flag, ...] = (
    _OPTIMIZER.works(
        "optimizer",
        FlagKind.CHOICE,
        _RATES.name,
        "optimizer from torch.optim; momentum: SGD with Nesterov momentum",
        choices=OPTIMIZERS,
    ),
    _OPTIMIZER.works(
        "init_learning_rate",
        FlagKind.NUMBER,
        _RATES.init_learning_rate,
        "constant learning rate; default: the model's own",
    ),
    _OPTIMIZER.works(
        "weight_decay", FlagKind.NUMBER, _RATES.weight_decay, "weight decay, except for batch-norm parameters"
    ),
    _OPTIMIZER.works(
        "momentum", FlagKind.NUMBER, _RATES.momentum, "momentum of the momentum optimizer", only_with=_MOMENTUM
    ),
    _OPTIMIZER.works(
        "rmsprop_decay",
        FlagKind.NUMBER,
        _RATES.rmsprop_decay,
        "decay rate of the squared-gradient average",
        only_with=_RMSPROP,
    ),
    _OPTIMIZER.works(
        "rmsprop_momentum", FlagKind.NUMBER, _RATES.rmsprop_momentum, "momentum of rmsprop", only_with=_RMSPROP
    ),
    _OPTIMIZER.works(
        "rmsprop_epsilon", FlagKind.NUMBER, _RATES.rmsprop_epsilon, "added to the divisor", only_with=_RMSPROP
    ),
    _OPTIMIZER.works(
        "adam_beta1", FlagKind.NUMBER, _RATES.adam_beta1, "decay rate of the gradient average", only_with=_ADAM
    ),
    _OPTIMIZER.works(
        "adam_beta2", FlagKind.NUMBER, _RATES.adam_beta2, "decay rate of the squared-gradient average", only_with=_ADAM
    ),
    _OPTIMIZER.works("adam_epsilon", FlagKind.NUMBER, _RATES.adam_epsilon, "added to the divisor", only_with=_ADAM),
    _OPTIMIZER.works(
        "gradient_clip", FlagKind.NUMBER, None, "clip each element of a worker's gradients to between -X and X"
    ),
    _OPTIMIZER.works(
        "piecewise_learning_rate_schedule",
        FlagKind.TEXT,
        None,
        "rates and the epochs at which they change: LR0;E1;LR1;...",
    ),
    _OPTIMIZER.works("num_epochs_per_decay", FlagKind.NUMBER, 0.0, "epochs between decays of --init_learning_rate"),
    _OPTIMIZER.works("learning_rate_decay_factor", FlagKind.NUMBER, 0.0, "factor of each decay"),
    _OPTIMIZER.works("minimum_learning_rate", FlagKind.NUMBER, 0.0, "learning rate at which decay stops"),
    _OPTIMIZER.works(
        "num_learning_rate_warmup_epochs",
        FlagKind.NUMBER,
        0.0,
        "epochs over which the rate rises from 0 to its given value",
    ),
    _OPTIMIZER.works(
        "resnet_base_lr",
        FlagKind.NUMBER,
        None,
        "base rate of the resnet models' own schedule, for a global batch of 256",
    ),
    _OPTIMIZER.works(
        "loss_type_to_report",
        FlagKind.CHOICE,
        "total_loss",
        "which loss the step lines show: with or without weight decay",
        choices=("total_loss", "base_loss"),
    ),
    _OPTIMIZER.notice(
        "single_l2_loss_op",
        FlagKind.SWITCH,
        False,
        "sum the weights' squares in one operation",
        "weight decay is part of the optimizer here, not a separate operation.",
    ),
    _OPTIMIZER.notice(
        "compute_lr_on_cpu",
        FlagKind.SWITCH,
        False,
        "compute the learning rate on the CPU",
        "the learning rate is always computed on the CPU.",
    ),
)
