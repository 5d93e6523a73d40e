"""Flags that tune TensorFlow's own engine, and flags that only older releases had."""

from __future__ import annotations

from lockstep.cli.flags.flag import Flag, FlagKind, Group, Rows

_TENSORFLOW = Rows(Group.TENSORFLOW)
_OLDER = Rows(Group.OLDER)

_GRAPH = "it configures TensorFlow's graphs and their compiler, which PyTorch does not have."
_MKL = "it configures TensorFlow's MKL build; PyTorch uses oneDNN automatically (threads: --num_threads)."
_MEMORY = "it configures TensorFlow's GPU memory; PyTorch allocates memory as needed."
_THREADS = "it configures TensorFlow's GPU threads; PyTorch launches GPU work from one thread."
_CUDNN = "it selects a TensorFlow GPU kernel; PyTorch selects its own."

TENSORFLOW_FLAGS: tuple[Flag, ...] = (
    _TENSORFLOW.notice("xla", FlagKind.SWITCH, False, "compile the graph with XLA", _GRAPH),
    _TENSORFLOW.notice("xla_compile", FlagKind.SWITCH, False, "compile the model with XLA", _GRAPH),
    _TENSORFLOW.notice("enable_optimizations", FlagKind.SWITCH, True, "optimise the graph", _GRAPH),
    _TENSORFLOW.notice("rewriter_config", FlagKind.TEXT, None, "settings of the graph's optimiser", _GRAPH),
    _TENSORFLOW.notice("use_resource_vars", FlagKind.SWITCH, False, "use resource variables", _GRAPH),
    _TENSORFLOW.notice("use_tf_layers", FlagKind.SWITCH, True, "build the model from tf.layers", _GRAPH),
    _TENSORFLOW.notice("sparse_to_dense_grads", FlagKind.SWITCH, False, "make sparse gradients dense", _GRAPH),
    _TENSORFLOW.notice("mkl", FlagKind.SWITCH, False, "set MKL's environment variables", _MKL),
    _TENSORFLOW.notice("kmp_blocktime", FlagKind.WHOLE, 0, "how long MKL's threads spin", _MKL),
    _TENSORFLOW.notice("kmp_affinity", FlagKind.TEXT, None, "where MKL's threads run", _MKL),
    _TENSORFLOW.notice("kmp_settings", FlagKind.WHOLE, 1, "print MKL's settings", _MKL),
    _TENSORFLOW.notice(
        "num_inter_threads",
        FlagKind.WHOLE,
        0,
        "operations of a step that run in parallel",
        "PyTorch runs the operations of a step one after another; --num_threads sets the threads within one.",
    ),
    _TENSORFLOW.notice(
        "gpu_thread_mode",
        FlagKind.CHOICE,
        "gpu_private",
        "which threads serve a GPU",
        _THREADS,
        "gpu_private",
        "gpu_shared",
        "global",
    ),
    _TENSORFLOW.notice("per_gpu_thread_count", FlagKind.WHOLE, 0, "threads for each GPU", _THREADS),
    _TENSORFLOW.notice("allow_growth", FlagKind.SWITCH, None, "allocate GPU memory as needed", _MEMORY),
    _TENSORFLOW.notice("force_gpu_compatible", FlagKind.SWITCH, False, "pin all host tensors", _MEMORY),
    _TENSORFLOW.notice("timestamped_allocator", FlagKind.SWITCH, False, "stamp freed GPU memory", _MEMORY),
    _TENSORFLOW.notice("gpu_kt_max_interval", FlagKind.WHOLE, 0, "kernels between two tracking events", _MEMORY),
    _TENSORFLOW.notice("gpu_kt_max_bytes", FlagKind.WHOLE, 0, "bytes between two tracking events", _MEMORY),
    _TENSORFLOW.notice("gpu_kt_max_pending", FlagKind.WHOLE, 0, "tracking events pending at once", _MEMORY),
    _TENSORFLOW.notice("winograd_nonfused", FlagKind.SWITCH, True, "allow the Winograd convolution", _CUDNN),
    _TENSORFLOW.notice("batchnorm_persistent", FlagKind.SWITCH, True, "use cuDNN's persistent batch-norm", _CUDNN),
    _TENSORFLOW.notice(
        "sync_on_finish",
        FlagKind.SWITCH,
        False,
        "let the devices finish before the end time is taken",
        "the devices always finish before a time is taken.",
    ),
    _TENSORFLOW.notice(
        "use_python32_barrier",
        FlagKind.SWITCH,
        False,
        "start the GPUs of a worker together",
        "one thread of a worker starts the work of all its devices, so they begin together anyway.",
    ),
)

OLDER_FLAGS: tuple[Flag, ...] = (
    _OLDER.refused(
        "learning_rate",
        FlagKind.NUMBER,
        None,
        "name of --init_learning_rate in 2017",
        "it has been renamed; use --init_learning_rate.",
    ),
    _OLDER.refused(
        "pretrain_dir",
        FlagKind.TEXT,
        None,
        "folder of the initial parameters, in 2017",
        "training always starts from fresh parameters here; leave it out.",
    ),
    _OLDER.notice(
        "use_nccl",
        FlagKind.SWITCH,
        True,
        "sum gradients with NCCL, in 2017",
        "use --variable_update and --all_reduce_spec to choose how gradients are summed.",
    ),
    _OLDER.notice(
        "cache_data",
        FlagKind.SWITCH,
        False,
        "keep a few images in memory, in 2018",
        "the operating system already caches files that are read again.",
    ),
    _OLDER.notice("enable_layout_optimizer", FlagKind.SWITCH, False, "optimise the graph's layout, in 2018", _GRAPH),
    _OLDER.refused(
        "result_storage",
        FlagKind.TEXT,
        None,
        "where to store results, in 2018",
        "results go to files; leave it out and give --benchmark_log_dir.",
    ),
)
