"""Flags that turn a screw of TensorFlow's own engine, and names that only older releases had."""

from __future__ import annotations

from lockstep.cli.flags.flag import Flag, Group, Kind, Rows

_TENSORFLOW = Rows(Group.TENSORFLOW)
_OLDER = Rows(Group.OLDER)

_GRAPH = "it is about TensorFlow's graphs and their compiler; PyTorch has none of them."
_MKL = "it is about TensorFlow's build with MKL; PyTorch uses oneDNN by itself (threads: --num_threads)."
_MEMORY = "it is about TensorFlow's GPU memory; PyTorch takes memory as it needs it."
_THREADS = "it is about TensorFlow's threads for GPUs; PyTorch starts GPU work from one thread."
_CUDNN = "it picks one of TensorFlow's GPU kernels; PyTorch picks its own."

TENSORFLOW_FLAGS: tuple[Flag, ...] = (
    _TENSORFLOW.notice("xla", Kind.SWITCH, False, "compile the graph with XLA", _GRAPH),
    _TENSORFLOW.notice("xla_compile", Kind.SWITCH, False, "compile the model with XLA", _GRAPH),
    _TENSORFLOW.notice("enable_optimizations", Kind.SWITCH, True, "optimise the graph", _GRAPH),
    _TENSORFLOW.notice("rewriter_config", Kind.TEXT, None, "settings of the graph's optimiser", _GRAPH),
    _TENSORFLOW.notice("use_resource_vars", Kind.SWITCH, False, "use resource variables", _GRAPH),
    _TENSORFLOW.notice("use_tf_layers", Kind.SWITCH, True, "build the model of tf.layers", _GRAPH),
    _TENSORFLOW.notice("sparse_to_dense_grads", Kind.SWITCH, False, "make sparse gradients dense", _GRAPH),
    _TENSORFLOW.notice("mkl", Kind.SWITCH, False, "set the variables of MKL", _MKL),
    _TENSORFLOW.notice("kmp_blocktime", Kind.WHOLE, 0, "how long MKL's threads spin", _MKL),
    _TENSORFLOW.notice("kmp_affinity", Kind.TEXT, None, "where MKL's threads run", _MKL),
    _TENSORFLOW.notice("kmp_settings", Kind.WHOLE, 1, "print MKL's settings", _MKL),
    _TENSORFLOW.notice(
        "num_inter_threads",
        Kind.WHOLE,
        0,
        "operations of a step that run side by side",
        "PyTorch runs the operations of a step one after another; --num_threads sets the threads inside one.",
    ),
    _TENSORFLOW.notice(
        "gpu_thread_mode",
        Kind.CHOICE,
        "gpu_private",
        "which threads serve a GPU",
        _THREADS,
        "gpu_private",
        "gpu_shared",
        "global",
    ),
    _TENSORFLOW.notice("per_gpu_thread_count", Kind.WHOLE, 0, "threads for each GPU", _THREADS),
    _TENSORFLOW.notice("allow_growth", Kind.SWITCH, None, "take GPU memory as needed", _MEMORY),
    _TENSORFLOW.notice("force_gpu_compatible", Kind.SWITCH, False, "pin all of the host's tensors", _MEMORY),
    _TENSORFLOW.notice("timestamped_allocator", Kind.SWITCH, False, "stamp freed GPU memory", _MEMORY),
    _TENSORFLOW.notice("gpu_kt_max_interval", Kind.WHOLE, 0, "kernels between two tracking events", _MEMORY),
    _TENSORFLOW.notice("gpu_kt_max_bytes", Kind.WHOLE, 0, "bytes between two tracking events", _MEMORY),
    _TENSORFLOW.notice("gpu_kt_max_pending", Kind.WHOLE, 0, "tracking events under way at once", _MEMORY),
    _TENSORFLOW.notice("winograd_nonfused", Kind.SWITCH, True, "allow the Winograd convolution", _CUDNN),
    _TENSORFLOW.notice("batchnorm_persistent", Kind.SWITCH, True, "use cuDNN's persistent batch-norm", _CUDNN),
    _TENSORFLOW.notice(
        "sync_on_finish",
        Kind.SWITCH,
        False,
        "let the devices finish before the end is timed",
        "the devices always finish before a time is taken.",
    ),
    _TENSORFLOW.notice(
        "use_python32_barrier",
        Kind.SWITCH,
        False,
        "let the GPUs of a worker start together",
        "one thread of a worker starts the work of all its devices, so they begin together anyway.",
    ),
)

OLDER_FLAGS: tuple[Flag, ...] = (
    _OLDER.refused(
        "learning_rate",
        Kind.NUMBER,
        None,
        "name of --init_learning_rate in 2017",
        "it has another name today; give --init_learning_rate.",
    ),
    _OLDER.refused(
        "pretrain_dir",
        Kind.TEXT,
        None,
        "folder of the parameters to start from, in 2017",
        "this version starts from fresh parameters; leave it out.",
    ),
    _OLDER.notice(
        "use_nccl",
        Kind.SWITCH,
        True,
        "sum gradients with NCCL, in 2017",
        "--variable_update and --all_reduce_spec say how gradients are summed here.",
    ),
    _OLDER.notice(
        "cache_data",
        Kind.SWITCH,
        False,
        "keep a few pictures in memory, in 2018",
        "the operating system keeps files in memory that are read again.",
    ),
    _OLDER.notice("enable_layout_optimizer", Kind.SWITCH, False, "optimise the graph's layout, in 2018", _GRAPH),
    _OLDER.refused(
        "result_storage",
        Kind.TEXT,
        None,
        "where to store results, in 2018",
        "results go to files; leave it out and give --benchmark_log_dir.",
    ),
)
