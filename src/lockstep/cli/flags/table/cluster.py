"""Flags about the cluster and about the data sent in it."""

from __future__ import annotations

from dataclasses import replace

from lockstep.benchmark.settings.config import COLLECTIVE_UPDATES, VARIABLE_UPDATES, WIRE_DTYPES, ExchangeConfig
from lockstep.cli.flags.flag import Flag, FlagKind, Group, Rows
from lockstep.cli.flags.metrics_rows import METRICS_ROWS
from lockstep.runtime.startup.cluster import ON_STALL, ON_WORKER_LOSS, PROTOCOLS, ClusterSpec
from lockstep.security.chosen import TOKEN_REFUSAL

_SPEC = ClusterSpec()
_EXCHANGE = ExchangeConfig()
_CLUSTER = Rows(Group.CLUSTER)
_ROWS = Rows(Group.EXCHANGE)

_ALL_REDUCE_SPEC = "torch.distributed chooses the algorithm itself; use collective, nccl or gloo."
_NO_SUCH_PATH = "this transport is not supported; use --server_protocol=auto."
_ALL_REDUCE_KNOB = "it tunes TensorFlow's all-reduce; here gradients are sent to the servers in buckets (--bucket_mb)."

CLUSTER_FLAGS: tuple[Flag, ...] = (
    _CLUSTER.works(
        "ps",
        FlagKind.WHOLE,
        None,
        "with --workers: run a whole cluster on this machine, with N servers",
        upstream=False,
    ),
    _CLUSTER.works(
        "workers",
        FlagKind.WHOLE,
        None,
        "with --ps: run a whole cluster on this machine, with N workers",
        upstream=False,
    ),
    _CLUSTER.works(
        "job_name",
        FlagKind.CHOICE,
        "",
        "which kind of task this process is; without it and --ps: a single process",
        choices=("ps", "worker", ""),
        refused_choices=(("controller", "Lockstep has no separate controller task; use ps or worker."),),
    ),
    _CLUSTER.works(
        "task_index",
        FlagKind.WHOLE,
        0,
        "this task's index among its kind, from 0; worker 0 is the chief",
        needs="job_name",
    ),
    _CLUSTER.works(
        "ps_hosts",
        FlagKind.HOSTS,
        _SPEC.ps_hosts,
        "addresses of all servers, the same list on every task",
        needs="job_name",
    ),
    _CLUSTER.works(
        "worker_hosts",
        FlagKind.HOSTS,
        _SPEC.worker_hosts,
        "addresses of all workers, the same list on every task",
        needs="job_name",
    ),
    _CLUSTER.works(
        "bind",
        FlagKind.TEXT,
        _SPEC.bind,
        "address to listen on (host or host:port), if it is not the one in the list",
        needs="job_name",
        upstream=False,
    ),
    _CLUSTER.works(
        "ports",
        FlagKind.TEXT,
        _SPEC.ports,
        "FIRST-LAST: where tasks listen besides their listed ports; default: ports that the kernel chooses",
        upstream=False,
    ),
    _CLUSTER.works(
        "require_private",
        FlagKind.SWITCH,
        _SPEC.require_private,
        "encrypt tensors too, and refuse what cannot be encrypted: grpc+ucx, grpc+verbs, gloo and NCCL",
        upstream=False,
    ),
    _CLUSTER.works(
        "server_protocol",
        FlagKind.CHOICE,
        _SPEC.protocol,
        "how tensors are sent; auto: shared memory on one host, RDMA between hosts that have it, else TCP",
        choices=PROTOCOLS,
        refused_choices=(("grpc+gdr", _NO_SUCH_PATH), ("grpc+mpi", _NO_SUCH_PATH)),
    ),
    _CLUSTER.works(
        "rdma_device",
        FlagKind.TEXT,
        None,
        "with grpc+verbs: the RDMA device, NAME or NAME:PORT; default: the first active port",
        upstream=False,
    ),
    _CLUSTER.works(
        "rdma_gid_index",
        FlagKind.WHOLE,
        None,
        "with grpc+verbs: which of the port's GIDs to use (RoCE: address and version); default: the best one",
        upstream=False,
    ),
    _CLUSTER.works(
        "rdma_traffic_class",
        FlagKind.WHOLE,
        None,
        "with grpc+verbs: traffic class of the packets (RoCE: the byte with DSCP and ECN), 0 to 255",
        upstream=False,
    ),
    _CLUSTER.works(
        "rdma_service_level",
        FlagKind.WHOLE,
        None,
        "with grpc+verbs: service level (InfiniBand) or priority (RoCE), 0 to 15",
        upstream=False,
    ),
    _CLUSTER.works(
        "rdma_timeout",
        FlagKind.NUMBER,
        None,
        "with grpc+verbs: seconds until the device resends a packet that was not acknowledged",
        upstream=False,
    ),
    _CLUSTER.works(
        "rdma_retry_count",
        FlagKind.WHOLE,
        None,
        "with grpc+verbs: how often the device resends before the connection counts as broken, 0 to 7",
        upstream=False,
    ),
    _CLUSTER.works(
        "rdma_gpudirect",
        FlagKind.SWITCH,
        False,
        "with grpc+verbs: the device accesses GPU memory directly, not through the host (untested)",
        upstream=False,
    ),
    _CLUSTER.works(
        "startup_timeout",
        FlagKind.NUMBER,
        _SPEC.startup_timeout,
        "seconds to wait for all tasks to join",
        upstream=False,
    ),
    _CLUSTER.works(
        "stall_after",
        FlagKind.NUMBER,
        _SPEC.stall_after,
        "seconds without progress or a proven cause after which a run counts as stalled",
        upstream=False,
    ),
    _CLUSTER.works(
        "user_code_timeout",
        FlagKind.NUMBER,
        _SPEC.user_code_timeout,
        "seconds that the training program of a worker may wait, or loop, in one step before the run counts as stalled",
        upstream=False,
    ),
    _CLUSTER.works(
        "on_stall",
        FlagKind.CHOICE,
        _SPEC.on_stall,
        "after a stall, or a failure that cannot recover: only report it, or end the job (exit code 3)",
        choices=ON_STALL,
        upstream=False,
    ),
    _CLUSTER.works(
        "on_verdict",
        FlagKind.TEXT,
        None,
        "a command to run when a verdict is printed; it gets the verdict as JSON on its standard input",
        upstream=False,
    ),
    _CLUSTER.works(
        "verdict_webhook",
        FlagKind.TEXT,
        None,
        "an http(s) address to which a verdict is posted as JSON",
        upstream=False,
    ),
    *METRICS_ROWS,
    _CLUSTER.works(
        "rejoin_timeout",
        FlagKind.NUMBER,
        _SPEC.rejoin_timeout,
        "seconds to wait for a lost task to come back",
        upstream=False,
    ),
    _CLUSTER.works(
        "grace",
        FlagKind.NUMBER,
        _SPEC.grace,
        "seconds that a job may take to finish and save its step after SIGTERM (to all tasks, or to server 0)",
        upstream=False,
    ),
    _CLUSTER.works(
        "on_worker_loss",
        FlagKind.CHOICE,
        _SPEC.on_worker_loss,
        "when a worker is lost: wait for its restart, continue without it until it rejoins (shrink), or end (abort)",
        choices=ON_WORKER_LOSS,
        upstream=False,
    ),
    _CLUSTER.works(
        "server_replicas",
        FlagKind.WHOLE,
        _SPEC.server_replicas,
        "1: another server holds all that each server holds, and takes over when that one is lost",
        upstream=False,
    ),
    _CLUSTER.works(
        "restarts",
        FlagKind.WHOLE,
        _SPEC.restarts,
        "how often a monitor restarts its task after a signal has killed it",
        upstream=False,
    ),
    _CLUSTER.works(
        "spares",
        FlagKind.WHOLE,
        _SPEC.spares,
        "how many processes wait, with torch loaded and data opened, to take the place of a lost task; with --restarts",
        upstream=False,
    ),
    _CLUSTER.works(
        "key_file",
        FlagKind.TEXT,
        None,
        "file with the key of the job (also LOCKSTEP_KEY_FILE; default: your own, ~/.config/lockstep/key)",
        upstream=False,
    ),
    _CLUSTER.works(
        "insecure",
        FlagKind.SWITCH,
        False,
        "no key and no encryption: whoever reaches a port of the job can read it, change it and end it",
        upstream=False,
    ),
    replace(
        _CLUSTER.refused("job_token", FlagKind.SECRET, "", "a secret in the command line", TOKEN_REFUSAL),
        upstream=False,
    ),
    _CLUSTER.refused(
        "controller_host",
        FlagKind.TEXT,
        None,
        "the task that drives distributed_all_reduce",
        "Lockstep has no separate controller task, not even in that mode; leave it out.",
    ),
    _CLUSTER.refused(
        "horovod_device",
        FlagKind.CHOICE,
        "",
        "device for Horovod's exchange",
        "Horovod is a separate system and is not used here; leave it out and use --ps_hosts and --worker_hosts.",
        "",
        "cpu",
        "gpu",
    ),
)

EXCHANGE_FLAGS: tuple[Flag, ...] = (
    _ROWS.works(
        "variable_update",
        FlagKind.CHOICE,
        _EXCHANGE.variable_update,
        "where parameters live and how gradients reach them",
        choices=VARIABLE_UPDATES,
        refused_choices=(
            (
                "horovod",
                "Horovod is a separate system and is not used here; use --variable_update=collective_all_reduce.",
            ),
        ),
    ),
    _ROWS.works(
        "cross_replica_sync",
        FlagKind.SWITCH,
        _EXCHANGE.cross_replica_sync,
        "every step waits for the gradients of all workers; without it, each worker proceeds at its own pace",
    ),
    _ROWS.works(
        "local_parameter_device",
        FlagKind.CHOICE,
        _EXCHANGE.local_parameter_device,
        "where a server keeps and updates its parameters; the CPU if it has no GPU, or with --device=cpu",
        choices=("cpu", "gpu"),
    ),
    _ROWS.works(
        "wire_dtype",
        FlagKind.CHOICE,
        _EXCHANGE.wire_dtype,
        "the type in which gradients are sent to a server; 16-bit types halve the bytes and lose precision",
        choices=WIRE_DTYPES,
        only_with=("variable_update", ("parameter_server", "distributed_replicated")),
        upstream=False,
    ),
    _ROWS.works(
        "bucket_mb",
        FlagKind.NUMBER,
        None,
        "size in MiB of the buckets in which tensors are sent; default: 4 to 8, up to 64 if all tasks share one host's "
        "memory, 128 with --compile",
        upstream=False,
    ),
    _ROWS.refused(
        "staged_vars",
        FlagKind.SWITCH,
        False,
        "compute with the previous step's parameters",
        "computation always uses the newest parameters here; leave it out, or use --variable_consistency=relaxed "
        "in a mode without servers.",
    ),
    _ROWS.works(
        "variable_consistency",
        FlagKind.CHOICE,
        _EXCHANGE.variable_consistency,
        "relaxed: apply a step's gradients at the end of the next step (in the modes without servers)",
        choices=("strong", "relaxed"),
    ),
    _ROWS.works(
        "all_reduce_spec",
        FlagKind.CHOICE,
        _EXCHANGE.all_reduce_spec or "",
        "which all-reduce to use; collective: NCCL on GPUs and gloo on CPUs",
        choices=("", "collective", "nccl", "gloo"),
        refused_choices=tuple((name, _ALL_REDUCE_SPEC) for name in ("xring", "pscpu", "psgpu", "nccl/xring")),
        only_with=("variable_update", COLLECTIVE_UPDATES),
    ),
    _ROWS.works(
        "gradient_repacking",
        FlagKind.WHOLE,
        _EXCHANGE.gradient_repacking,
        "pack gradients into N pieces; 0: by --bucket_mb",
        only_with=("variable_update", COLLECTIVE_UPDATES),
    ),
    _ROWS.works(
        "collective_port",
        FlagKind.WHOLE,
        _EXCHANGE.collective_port,
        "port on which worker 0 listens for the others; default: the last of --ports, or the first after its own that "
        "no worker has",
        only_with=("variable_update", COLLECTIVE_UPDATES),
        upstream=False,
    ),
    _ROWS.refused(
        "hierarchical_copy",
        FlagKind.SWITCH,
        False,
        "copy between the GPUs of a worker in two stages",
        "the GPUs of a worker send their gradients directly to its first GPU; leave it out.",
    ),
    _ROWS.notice("compact_gradient_transfer", FlagKind.SWITCH, True, "send 16-bit gradients", _ALL_REDUCE_KNOB),
    _ROWS.notice("agg_small_grads_max_bytes", FlagKind.WHOLE, 0, "combine gradients below this size", _ALL_REDUCE_KNOB),
    _ROWS.notice("agg_small_grads_max_group", FlagKind.WHOLE, 10, "combine at most N gradients", _ALL_REDUCE_KNOB),
    _ROWS.notice("allreduce_merge_scope", FlagKind.WHOLE, 1, "merge N all-reduce calls", _ALL_REDUCE_KNOB),
    _ROWS.notice(
        "network_topology", FlagKind.CHOICE, "dgx1", "how the GPUs are wired", _ALL_REDUCE_KNOB, "dgx1", "gcp_v100"
    ),
)
