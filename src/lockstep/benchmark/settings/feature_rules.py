"""What can be wrong with data, evaluation, precision and schedules: one function per rule, as in ``rules.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lockstep.benchmark.data.names import RESIZE_METHODS
from lockstep.benchmark.settings.config import BenchConfig
from lockstep.benchmark.settings.schedules import BadSchedule, parse_piecewise


def data_rules(config: BenchConfig) -> Iterator[str]:
    data = config.data
    if data.resize_method not in RESIZE_METHODS:
        yield f"--resize_method={data.resize_method} is not known; use one of: {', '.join(RESIZE_METHODS)}."
    if data.processes is not None and not 1 <= data.processes <= 256:
        yield f"--datasets_num_private_threads={data.processes} is out of range; give a number from 1 to 256."
    if not 1 <= data.prefetch <= 64:
        yield f"--datasets_prefetch_buffer_size={data.prefetch} is out of range; give a number from 1 to 64."
    if data.max_bad_records < 0:
        yield f"--max_bad_records={data.max_bad_records} is negative; give 0 to end at the first bad record, or more."


def run_rules(config: BenchConfig) -> Iterator[str]:
    run = config.run
    if run.num_epochs is not None and run.num_epochs <= 0:
        yield f"--num_epochs={run.num_epochs:g} leaves nothing to train; give a number above 0."
    if run.forward_only and config.evaluation.only:
        yield "--forward_only and --eval are two different modes; leave one of them out."
    if run.forward_only and config.cluster is not None:
        yield "--forward_only exchanges nothing, so it needs no cluster; run it in a single process."


def evaluation_rules(config: BenchConfig) -> Iterator[str]:
    ask = config.evaluation
    real = config.data.is_real(config.data_name)
    if ask.only:
        if config.output.train_dir is None:
            yield "--eval needs trained parameters; give --train_dir, the folder to which a training run wrote them."
        if config.cluster is not None:
            yield "--eval runs in a single process; leave out --job_name, --ps and --workers."
    if ask.during_training and config.cluster is not None:
        yield (
            "evaluation during training runs in a single process; train with servers first, "
            "then run --eval on its --train_dir."
        )
    if ask.stop_at_top_1 is not None:
        if not 0 < ask.stop_at_top_1 <= 1:
            yield f"--stop_at_top_1_accuracy={ask.stop_at_top_1:g} is out of range; give a fraction above 0, up to 1."
        if not ask.during_training:
            yield "--stop_at_top_1_accuracy needs evaluations; add, e.g., --eval_during_training_every_n_epochs=1."
    if ask.during_training and not real:
        yield "evaluation during training needs real data; give --data_dir, or --data_name=digits for a first run."
    if ask.batch_size < 0 or ask.interval_secs < 0:
        yield "--eval_batch_size and --eval_interval_secs must not be negative; give 0 or more."
    for name, number in (("num_eval_batches", ask.num_batches), ("num_eval_epochs", ask.num_epochs)):
        if number is not None and number <= 0:
            yield f"--{name}={number:g} leaves nothing to evaluate; give a number above 0."


def precision_rules(config: BenchConfig) -> Iterator[str]:
    precision = config.precision
    if precision.use_fp16 and precision.use_bf16:
        yield "--use_fp16 and --use_bf16 exclude each other; leave one of them out."
    if precision.loss_scale is not None and precision.loss_scale <= 0:
        yield f"--fp16_loss_scale={precision.loss_scale:g} would lose the gradients; give a number above 0."
    if precision.raise_every < 1:
        yield f"--fp16_inc_loss_scale_every_n={precision.raise_every} is out of range; give 1 or more."
    if precision.auto_loss_scale and not precision.use_fp16:
        yield "--fp16_enable_auto_loss_scale needs --use_fp16; add --use_fp16, or leave both out."
    if precision.auto_loss_scale and config.cluster is not None and not config.exchange.is_collective:
        yield (
            "--fp16_enable_auto_loss_scale cannot undo a step that servers have applied; "
            "use --fp16_loss_scale, --use_bf16, or a single process."
        )


def schedule_rules(config: BenchConfig) -> Iterator[str]:
    schedule, constant = config.schedule, config.optimizer.init_learning_rate
    if schedule.piecewise is not None:
        try:
            parse_piecewise(schedule.piecewise)
        except BadSchedule as error:
            yield f"--piecewise_learning_rate_schedule={schedule.piecewise} cannot be read: {error}."
        if constant is not None:
            yield "--piecewise_learning_rate_schedule and --init_learning_rate exclude each other; leave one out."
    decay = (schedule.num_epochs_per_decay, schedule.decay_factor)
    if any(decay) and not (all(decay) and constant is not None):
        yield (
            "a decay needs all of --init_learning_rate, --num_epochs_per_decay and --learning_rate_decay_factor; "
            "add what is missing."
        )
    if schedule.minimum and not all(decay):
        yield "--minimum_learning_rate ends a decay; add --num_epochs_per_decay and --learning_rate_decay_factor."
    if min(*decay, schedule.minimum, schedule.warmup_epochs) < 0:
        yield "the numbers of a learning-rate schedule must not be negative; give 0 or more."
    if schedule.warmup_epochs and constant is None and schedule.piecewise is None:
        yield (
            "--num_learning_rate_warmup_epochs warms up a rate that you give; "
            "add --init_learning_rate or --piecewise_learning_rate_schedule."
        )
    if config.optimizer.gradient_clip is not None and config.optimizer.gradient_clip <= 0:
        yield f"--gradient_clip={config.optimizer.gradient_clip:g} would leave no gradient; give a number above 0."


def output_rules(config: BenchConfig) -> Iterator[str]:
    output = config.output
    if not 0 <= output.summary_verbosity <= 3:
        yield f"--summary_verbosity={output.summary_verbosity} is out of range; give a number from 0 to 3."
    if output.summary_verbosity and output.train_dir is None:
        yield "--summary_verbosity writes into --train_dir; give that folder too."
    if output.save_summaries_steps < 0:
        yield f"--save_summaries_steps={output.save_summaries_steps} is negative; give 0 for every step line, or more."
    if output.save_summaries_steps and not output.summary_verbosity:
        yield "--save_summaries_steps needs something to write; add --summary_verbosity=1."
    if not 1 <= output.trace_steps <= 1000:
        yield f"--trace_steps={output.trace_steps} is out of range; give a number from 1 to 1000."


def checkpoint_rules(config: BenchConfig) -> Iterator[str]:
    output = config.output
    asked = bool(output.save_model_secs or output.save_model_steps)
    for name, value in (("save_model_secs", output.save_model_secs), ("max_ckpts_to_keep", output.max_ckpts_to_keep)):
        if value < 0:
            yield f"--{name}={value} is negative; give 0 or more."
    if output.save_model_steps is not None and output.save_model_steps < 1:
        yield f"--save_model_steps={output.save_model_steps} is out of range; give 1 or more, or leave it out."
    if output.from_scratch and output.train_dir is None:
        yield "--from_scratch sets aside what --train_dir holds; give --train_dir too, or leave out --from_scratch."
    elif output.from_scratch and (config.cluster is None or config.exchange.is_collective):
        yield "only runs with servers resume, so this one begins from scratch anyway; leave out --from_scratch."
    if asked and output.train_dir is None:
        yield "--save_model_secs and --save_model_steps write into --train_dir; give that folder too."
    elif asked and (config.cluster is None or config.exchange.is_collective):
        yield (
            "checkpoints are written by servers, and this mode has none; leave out --save_model_secs and "
            "--save_model_steps, or add --ps=1 --workers=1."
        )
    elif asked and not config.exchange.cross_replica_sync:
        yield "without --cross_replica_sync there is no common step to save; leave out the checkpoint flags."


FEATURE_RULES: dict[str, Callable[[BenchConfig], Iterator[str]]] = {
    "data": data_rules,
    "mode": run_rules,
    "evaluation": evaluation_rules,
    "precision": precision_rules,
    "schedule": schedule_rules,
    "files": output_rules,
    "checkpoints": checkpoint_rules,
}
