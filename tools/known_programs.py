"""The programs of ``docs/your-program.md``: which file, the edits for Lockstep and for DDP on CPUs, and the flags."""

from __future__ import annotations

from dataclasses import dataclass

from tools.program_edits import Edit, after, before, change, instead

CLIP = "1.0"


@dataclass(frozen=True, slots=True)
class KnownProgram:
    """A program of somebody else's, in a folder of their repository."""

    name: str
    repository: str
    """The flag of ``tools/your_programs.py`` with the user's copy."""
    folder: str
    script: str
    ours: tuple[Edit, ...]
    served: tuple[Edit, ...]
    """Besides, where servers update: what is clipped is the mean."""
    ddp: tuple[Edit, ...]
    """What DDP needs on CPUs, or in a program that does not have it."""
    both: tuple[Edit, ...]
    """Reporting the losses, and what makes two runs comparable."""
    flags: tuple[str, ...]
    resumed: tuple[str, ...] = ()
    """The flags of a second run, which goes on where the first ended."""


NANOGPT = KnownProgram(
    name="nanoGPT",
    repository="nanogpt",
    folder=".",
    script="train.py",
    ours=(
        after(r"^import torch$", "import lockstep"),
        instead(r"\binit_process_group\(", "job = lockstep.join()"),
        instead(r"^ +device = f", "device = str(job.device)"),
        instead(r"torch\.cuda\.set_device\(", "device != 'cpu' and torch.cuda.set_device(device)"),
        instead(r"= DDP\(", "job.wrap(model, optimizer)"),
        instead(r"^raw_model = ", "raw_model = model"),
        instead(r"\bdestroy_process_group\(\)", "job.close()"),
    ),
    served=(instead(r"\bclip_grad_norm_\(", "job.clip_grad_norm_(grad_clip)"),),
    ddp=(
        instead(r"^ +device = f", "device = 'cpu'"),
        instead(r"torch\.cuda\.set_device\("),
        instead(r"= DDP\(", "model = DDP(model)"),
        before(r"\bdestroy_process_group\(\)", "del model"),  # torch 2.13: what DDP keeps can wait for itself then
    ),
    both=(
        after(r"^import torch$", "from loss_report import report"),
        after(r"\blossf = ", "report(lossf)"),
    ),
    flags=(
        *("--device=cpu", "--backend=gloo", "--compile=False", "--dtype=float32", "--dataset=own", "--out_dir=out"),
        *("--n_layer=2", "--n_head=2", "--n_embd=32", "--block_size=32", "--batch_size=4", "--grad_clip=" + CLIP),
        *("--gradient_accumulation_steps=6", "--learning_rate=1e-2", "--warmup_iters=2", "--lr_decay_iters=40"),
        *("--eval_interval=10", "--eval_iters=2", "--max_iters=20"),
    ),
    resumed=("--init_from=resume", "--max_iters=40"),
)

WORD_MODEL = KnownProgram(
    name="word_language_model",
    repository="examples",
    folder="word_language_model",
    script="main.py",
    ours=(
        after(r"^import torch$", "import lockstep"),
        after(r"^args = ", "job = lockstep.join()", 'args.save += f".{job.worker}"'),
        before(r"^train_data = ", "args.batch_size *= job.workers"),
        after(
            r"^train_data = ",
            "train_data = train_data[:, job.worker :: job.workers].contiguous()",
            "args.batch_size //= job.workers",
        ),
        after(r"^ +optimizer = ", "job.wrap(model, optimizer)"),
    ),
    served=(instead(r"\bclip_grad_norm_\(", "job.clip_grad_norm_(args.clip)"),),
    ddp=(
        after(r"^import torch$", "import torch.distributed as dist"),
        after(
            r"^args = ",
            'dist.init_process_group("gloo")',
            "rank, world = dist.get_rank(), dist.get_world_size()",
            'args.save += f".{rank}"',
        ),
        before(r"^train_data = ", "args.batch_size *= world"),
        after(r"^train_data = ", "train_data = train_data[:, rank::world].contiguous()", "args.batch_size //= world"),
        after(r"^ +optimizer = ", "ddp = nn.parallel.DistributedDataParallel(model)"),
        instead(r"= model\(data, hidden\)", "output, hidden = ddp(data, hidden)", behind=r"^def train\("),
    ),
    both=(
        after(r"^import torch$", "from loss_report import report"),
        after(r"^ +loss = ", "report(loss)"),
    ),
    flags=(
        *("--data=data/own", "--use-optimizer", "--lr=0.003", "--clip=" + CLIP, "--epochs=2", "--emsize=16"),
        *("--nhid=16", "--nlayers=1", "--batch_size=8", "--bptt=10"),
    ),
)

DDP_TUTORIAL = KnownProgram(
    name="DDP tutorial",
    repository="examples",
    folder="distributed/ddp-tutorial-series",
    script="multigpu_torchrun.py",
    ours=(
        after(r"^import torch$", "import lockstep"),
        instead(r"torch\.cuda\.set_device\(", "global job"),
        instead(r"\binit_process_group\(", "job = lockstep.join()"),
        instead(r"self\.gpu_id = int\(", "self.gpu_id = job.device"),
        instead(r"= DDP\(", "job.wrap(self.model, self.optimizer)"),
        instead(r"\bloc = ", "loc = self.gpu_id"),
        change(r"\.module\b", ""),
        change(r"self\.gpu_id == 0", "job.is_chief"),
        change(r"DistributedSampler\(dataset\)", "DistributedSampler(dataset, job.workers, job.worker)"),
        instead(r"\bdestroy_process_group\(\)", "job.close()"),
    ),
    served=(instead(r"\bclip_grad_norm_\(", f"job.clip_grad_norm_({CLIP})"),),
    ddp=(
        instead(r"torch\.cuda\.set_device\("),
        change(r"\bnccl\b", "gloo"),
        instead(r"self\.gpu_id = int\(", 'self.gpu_id = "cpu"'),
        instead(r"= DDP\(", "self.model = DDP(self.model)"),
        instead(r"\bloc = ", "loc = self.gpu_id"),
        change(r"self\.gpu_id == 0", 'os.environ["RANK"] == "0"'),
        before(r"\bdestroy_process_group\(\)", "del trainer"),
    ),
    both=(
        after(r"^import torch$", "from loss_report import report"),
        before(r"\btrain_set = ", "torch.manual_seed(0)"),
        # As it comes, its loss is always 0: the cross entropy of a single class.
        instead(r"\bloss = ", "loss = F.mse_loss(output, targets)", "report(loss)"),
        before(r"\.optimizer\.step\(\)", f"torch.nn.utils.clip_grad_norm_(self.model.parameters(), {CLIP})"),
    ),
    flags=("2", "1"),
    resumed=("4", "1"),
)

HOROVOD_MNIST = KnownProgram(
    name="Horovod's mnist",
    repository="horovod",
    folder="examples/pytorch",
    script="pytorch_mnist.py",
    ours=(
        instead(r"^import horovod$", "import lockstep"),
        instead(r"^import horovod\.torch"),
        instead(r"hvd\.init\(\)", "job = lockstep.join()"),
        change(r"hvd\.local_rank\(\)", "job.device"),
        change(r"hvd\.rank\(\)", "job.worker"),
        change(r"hvd\.size\(\)", "job.workers"),
        instead(r"hvd\.broadcast_parameters"),
        instead(r"hvd\.broadcast_optimizer_state"),
        instead(r"^ +compression = hvd"),
        instead(r"hvd\.DistributedOptimizer\(", "job.wrap(model, optimizer)", through=r"gradient_predivide_factor\)"),
        change(r"hvd\.allreduce\(tensor, name=name\)", "job.all_reduce(tensor)"),
    ),
    served=(instead(r"\bclip_grad_norm_\(", f"job.clip_grad_norm_({CLIP})"),),
    ddp=(
        instead(r"^import horovod$", "import torch.distributed as dist"),
        instead(r"^import horovod\.torch"),
        instead(r"hvd\.init\(\)", 'dist.init_process_group("gloo")'),
        change(r"hvd\.rank\(\)", "dist.get_rank()"),
        change(r"hvd\.size\(\)", "dist.get_world_size()"),
        instead(r"hvd\.broadcast_parameters"),
        instead(r"hvd\.broadcast_optimizer_state"),
        instead(r"^ +compression = hvd"),
        instead(
            r"hvd\.DistributedOptimizer\(",
            "model = nn.parallel.DistributedDataParallel(model)",
            through=r"gradient_predivide_factor\)",
        ),
        instead(r"hvd\.allreduce\(", "avg_tensor = tensor / dist.get_world_size()", "dist.all_reduce(avg_tensor)"),
    ),
    both=(
        after(r"^import os$", "from loss_report import report"),
        instead(
            r"^ +optimizer\.step\(\)",
            f"torch.nn.utils.clip_grad_norm_(model.parameters(), {CLIP})",
            "optimizer.step()",
            "report(loss)",
        ),
    ),
    flags=("--epochs=1", "--batch-size=32", "--no-cuda"),
)

PROGRAMS = (NANOGPT, WORD_MODEL, DDP_TUTORIAL, HOROVOD_MNIST)


@dataclass(frozen=True, slots=True)
class KnownExample:
    """One of ours, under ``examples/``: each takes ``--ddp`` and ``--servers``. ``{folder}`` is a folder of the run."""

    script: str
    flags: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()


EXAMPLES = (
    KnownExample("transformers_loop.py", ("--save={folder}/saved.pt",), ("--save={folder}/saved.pt",)),
    KnownExample("transformers_trainer.py", ("--folder={folder}", "--steps=6"), ("--folder={folder}", "--resume")),
    KnownExample("accelerate_loop.py"),
    KnownExample("lightning_module.py", ("--workers={workers}",)),
)
