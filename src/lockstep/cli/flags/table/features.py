"""Flags about data, evaluation and precision."""

from __future__ import annotations

from lockstep.benchmark.data.names import RESIZE_METHODS
from lockstep.benchmark.settings.config import DATA_NAMES, BenchConfig
from lockstep.benchmark.settings.features import DataConfig, EvaluationConfig, PrecisionConfig
from lockstep.cli.flags.flag import Flag, FlagKind, Group, Rows

_BENCH = BenchConfig()
_OF_DATA = DataConfig()
_OF_EVALUATION = EvaluationConfig()
_OF_PRECISION = PrecisionConfig()
_DATA = Rows(Group.DATA)
_EVALUATION = Rows(Group.EVALUATION)
_PRECISION = Rows(Group.PRECISION)

_OWN_READER = "images are read by Lockstep's own processes here, not by tf.data."
_ONLY_IMAGES = "only data sets of images with one class each are supported; use imagenet, cifar10, pictures or digits."
_RESIZE_BY_TURNS = "a run uses one method throughout here; use bilinear."

DATA_FLAGS: tuple[Flag, ...] = (
    _DATA.works(
        "data_dir",
        FlagKind.TEXT,
        _OF_DATA.folder,
        "folder of a data set: TFRecords, CIFAR-10, or images in one folder per class; default: synthetic data",
    ),
    _DATA.works(
        "data_name",
        FlagKind.CHOICE,
        _BENCH.data_name,
        "the data set whose models and classes are used; with --data_dir, detected from the files; digits is built in",
        choices=DATA_NAMES,
        refused_choices=(("coco", _ONLY_IMAGES), ("librispeech", _ONLY_IMAGES)),
    ),
    _DATA.works(
        "max_bad_records",
        FlagKind.WHOLE,
        _OF_DATA.max_bad_records,
        "damaged records to skip, each reported in one line, before the run ends",
        upstream=False,
    ),
    _DATA.works("distortions", FlagKind.SWITCH, _OF_DATA.distortions, "distort colours (CIFAR-10: shift and flip)"),
    _DATA.works(
        "resize_method",
        FlagKind.CHOICE,
        _OF_DATA.resize_method,
        "how images are resized",
        choices=RESIZE_METHODS,
        refused_choices=(("crop", _RESIZE_BY_TURNS), ("round_robin", _RESIZE_BY_TURNS)),
    ),
    _DATA.works(
        "ml_perf", FlagKind.SWITCH, _OF_DATA.ml_perf, "subtract the channels' means instead of scaling to -1..1"
    ),
    _DATA.works(
        "datasets_num_private_threads",
        FlagKind.WHOLE,
        _OF_DATA.processes,
        "decoding processes per worker; default: the worker's share of the cores",
    ),
    _DATA.works("datasets_prefetch_buffer_size", FlagKind.WHOLE, _OF_DATA.prefetch, "batches to prepare ahead"),
    _DATA.works("datasets_use_prefetch", FlagKind.SWITCH, True, "prepare several batches ahead, not only the next one"),
    _DATA.works(
        "datasets_repeat_cached_sample", FlagKind.SWITCH, _OF_DATA.repeat_sample, "train on the first batch forever"
    ),
    _DATA.refused(
        "ml_perf_compliance_logging",
        FlagKind.SWITCH,
        False,
        "print the log lines of MLPerf",
        "Lockstep does not support MLPerf submissions; leave it out.",
    ),
    _DATA.notice(
        "distort_color_in_yiq",
        FlagKind.SWITCH,
        True,
        "distort colours in the YIQ space",
        "colours are always distorted in the YIQ space.",
    ),
    _DATA.notice(
        "input_preprocessor",
        FlagKind.TEXT,
        "default",
        "how images are preprocessed",
        "each data set has only one preprocessor here.",
    ),
    _DATA.notice(
        "fuse_decode_and_crop",
        FlagKind.SWITCH,
        True,
        "decode only the part of an image that is used",
        "images are decoded at the smallest sufficient scale instead.",
    ),
    _DATA.notice("use_datasets", FlagKind.SWITCH, True, "read with tf.data", _OWN_READER),
    _DATA.notice(
        "datasets_use_caching",
        FlagKind.SWITCH,
        False,
        "keep raw images in memory",
        "the operating system already caches files that are read again.",
    ),
    _DATA.notice("datasets_parallel_interleave_cycle_length", FlagKind.WHOLE, None, "files read at once", _OWN_READER),
    _DATA.notice("datasets_parallel_interleave_prefetch", FlagKind.WHOLE, None, "records read ahead", _OWN_READER),
    _DATA.notice(
        "datasets_sloppy_parallel_interleave",
        FlagKind.SWITCH,
        False,
        "read in any order",
        "the order of samples always follows from the seed.",
    ),
    _DATA.notice("multi_device_iterator_max_buffer_size", FlagKind.WHOLE, 1, "batches waiting for a GPU", _OWN_READER),
)

EVALUATION_FLAGS: tuple[Flag, ...] = (
    _EVALUATION.works("eval", FlagKind.SWITCH, False, "evaluate the parameters in --train_dir instead of training"),
    _EVALUATION.works(
        "eval_interval_secs",
        FlagKind.WHOLE,
        _OF_EVALUATION.interval_secs,
        "evaluate every N seconds, until stopped; 0: once",
    ),
    _EVALUATION.works("eval_during_training_every_n_steps", FlagKind.WHOLE, None, "evaluate every N steps"),
    _EVALUATION.works("eval_during_training_every_n_epochs", FlagKind.NUMBER, None, "evaluate every X epochs"),
    _EVALUATION.works("eval_during_training_at_specified_steps", FlagKind.LIST, (), "evaluate after these steps"),
    _EVALUATION.works("eval_during_training_at_specified_epochs", FlagKind.LIST, (), "evaluate after these epochs"),
    _EVALUATION.works("eval_batch_size", FlagKind.WHOLE, 0, "batch size for evaluation; 0: the same as for training"),
    _EVALUATION.works("num_eval_batches", FlagKind.WHOLE, None, "batches per evaluation; default: every image once"),
    _EVALUATION.works("num_eval_epochs", FlagKind.NUMBER, None, "passes over the images per evaluation"),
    _EVALUATION.works("eval_dir", FlagKind.TEXT, None, "folder for evaluation results (TensorBoard)"),
    _EVALUATION.works(
        "stop_at_top_1_accuracy", FlagKind.NUMBER, None, "end the run when an evaluation reaches this accuracy"
    ),
    _EVALUATION.works("print_training_accuracy", FlagKind.SWITCH, False, "add the accuracy to the step lines"),
    _EVALUATION.works("forward_only", FlagKind.SWITCH, False, "run the model without computing gradients"),
    _EVALUATION.notice(
        "freeze_when_forward_only",
        FlagKind.SWITCH,
        False,
        "turn the model's parameters into constants",
        "PyTorch has no graph to fold constants into.",
    ),
    _EVALUATION.refused(
        "trt_mode",
        FlagKind.CHOICE,
        "",
        "run the model with TensorRT",
        "models run in PyTorch here; leave it out and export the parameters of --train_dir instead.",
        "",
        "FP32",
        "FP16",
        "INT8",
    ),
    _EVALUATION.refused(
        "backbone_model_path",
        FlagKind.TEXT,
        None,
        "initial parameters of the ssd300 model",
        "the ssd300 model is not built in; leave it out.",
    ),
    _EVALUATION.notice(
        "collect_eval_results_async",
        FlagKind.SWITCH,
        False,
        "collect evaluation results in the background",
        "an evaluation's counts stay on the device until its end.",
    ),
    _EVALUATION.notice(
        "trt_max_workspace_size_bytes",
        FlagKind.WHOLE,
        4 << 30,
        "memory for TensorRT",
        "it only applies with --trt_mode, which is refused.",
    ),
)

PRECISION_FLAGS: tuple[Flag, ...] = (
    _PRECISION.works("use_fp16", FlagKind.SWITCH, False, "compute with 16-bit numbers; parameters stay 32-bit"),
    _PRECISION.works(
        "use_bf16",
        FlagKind.SWITCH,
        False,
        "compute with 16-bit numbers of wide range (bfloat16); parameters stay 32-bit",
        upstream=False,
    ),
    _PRECISION.works(
        "fp16_loss_scale", FlagKind.NUMBER, None, "factor by which the loss is scaled before backward; default: 128"
    ),
    _PRECISION.works(
        "fp16_enable_auto_loss_scale",
        FlagKind.SWITCH,
        False,
        "on infinite gradients, skip the step and halve the factor; double it after many good steps",
    ),
    _PRECISION.works(
        "fp16_inc_loss_scale_every_n",
        FlagKind.WHOLE,
        _OF_PRECISION.raise_every,
        "good steps before the factor is doubled",
    ),
    _PRECISION.refused(
        "fp16_vars",
        FlagKind.SWITCH,
        False,
        "keep parameters as 16-bit numbers",
        "parameters stay 32-bit, which is what the optimizer needs; leave it out.",
    ),
)
