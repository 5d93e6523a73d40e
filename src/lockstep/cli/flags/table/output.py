"""Flags about what a run prints and leaves behind."""

from __future__ import annotations

from lockstep.benchmark.settings.config import OutputConfig
from lockstep.cli.flags.flag import Flag, FlagKind, Group, Rows

_OUT = OutputConfig()
_OUTPUT = Rows(Group.OUTPUT)

_NO_GRAPH = "PyTorch runs a model without building a graph first; leave it out."

OUTPUT_FLAGS: tuple[Flag, ...] = (
    _OUTPUT.works("display_every", FlagKind.WHOLE, _OUT.display_every, "steps between two step lines"),
    _OUTPUT.works(
        "display_perf_ewma",
        FlagKind.NUMBER,
        _OUT.display_perf_ewma,
        "show a moving average of images/sec, with this weight (0 to 1) for earlier values",
    ),
    _OUTPUT.works(
        "train_dir",
        FlagKind.TEXT,
        _OUT.train_dir,
        "folder for checkpoints and the final parameters (safetensors), shared by all servers; a run restarted with it "
        "resumes",
    ),
    _OUTPUT.works(
        "timing_dir",
        FlagKind.TEXT,
        _OUT.timing_dir,
        "folder for one JSON file per task that shows where the time of each step went",
        upstream=False,
    ),
    _OUTPUT.works("verbose", FlagKind.SWITCH, _OUT.verbose, "print what each task does, in detail", upstream=False),
    _OUTPUT.works(
        "save_model_secs",
        FlagKind.WHOLE,
        _OUT.save_model_secs,
        "seconds between two checkpoints in --train_dir; 0: not by time. One more is written at the end",
    ),
    _OUTPUT.works(
        "save_model_steps",
        FlagKind.WHOLE,
        _OUT.save_model_steps,
        "steps between two checkpoints in --train_dir; default: not by steps",
    ),
    _OUTPUT.works(
        "max_ckpts_to_keep",
        FlagKind.WHOLE,
        _OUT.max_ckpts_to_keep,
        "how many of the newest checkpoints to keep in --train_dir; 0: all",
    ),
    _OUTPUT.works(
        "from_scratch",
        FlagKind.SWITCH,
        _OUT.from_scratch,
        "begin at step 0 whatever --train_dir holds; existing checkpoints are set aside, not removed",
        upstream=False,
    ),
    _OUTPUT.works(
        "summary_verbosity",
        FlagKind.WHOLE,
        _OUT.summary_verbosity,
        "TensorBoard files in --train_dir: 1 scalars, 2 + gradients, 3 + each gradient, parameter and images",
    ),
    _OUTPUT.works(
        "save_summaries_steps",
        FlagKind.WHOLE,
        _OUT.save_summaries_steps,
        "write TensorBoard files at step lines whose step is a multiple of this; 0: at every step line",
    ),
    _OUTPUT.works(
        "trace_file",
        FlagKind.TEXT,
        "",
        "file for a trace of the last steps (Chrome, Perfetto); in a cluster, each task adds its name",
    ),
    _OUTPUT.works("trace_steps", FlagKind.WHOLE, _OUT.trace_steps, "steps in --trace_file", upstream=False),
    _OUTPUT.notice(
        "use_chrome_trace_format",
        FlagKind.SWITCH,
        True,
        "format of --trace_file",
        "traces are always in Chrome's format.",
    ),
    _OUTPUT.works(
        "graph_file",
        FlagKind.TEXT,
        _OUT.graph_file,
        "file for the plan: which parameter is in which bucket on which server (text if it ends in .txt, else JSON)",
    ),
    _OUTPUT.refused("partitioned_graph_file_prefix", FlagKind.TEXT, None, "files for the graphs by device", _NO_GRAPH),
    _OUTPUT.refused(
        "tfprof_file",
        FlagKind.TEXT,
        None,
        "file for TensorFlow's profile",
        "this is the format of TensorFlow's own profiler; leave it out.",
    ),
    _OUTPUT.refused(
        "debugger",
        FlagKind.TEXT,
        None,
        "attach TensorFlow's debugger",
        "this is TensorFlow's own tool; leave it out and attach py-spy to a task's process.",
    ),
    _OUTPUT.works(
        "benchmark_log_dir", FlagKind.TEXT, _OUT.benchmark_log_dir, "folder for metric.log and benchmark_run.log (JSON)"
    ),
    _OUTPUT.works("benchmark_test_id", FlagKind.TEXT, _OUT.benchmark_test_id, "name of the run in benchmark_run.log"),
)
