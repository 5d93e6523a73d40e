"""The folder of a run in a temporary directory where other users were first."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from diagnose.faulty import frozen
from helpers.cluster import in_process_cluster
from helpers.other_user import NOBODY, SOMEBODY, being, everybodys_folder, needs_root, nobody_does
from helpers.programs import run_lockstep
from helpers.snapshots import PS0
from helpers.waiting import wait_until
from lockstep.diagnose.files import read_folder
from lockstep.drill.task import PlainStore, TaskPlan, train
from lockstep.protocol.core.faults import DropMessage
from lockstep.protocol.core.ids import ClusterShape, server, worker
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.runtime.watch.reporting import EVENTS
from lockstep.runtime.watch.run_folder import KEEP_FOLDERS, KEEP_SECONDS, RunFolder, WriteResult, run_folders

JOB = 0x0123456789ABCDEF
US = os.geteuid()
SECRET = "what only its owner may change\n"


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The temporary directory of this test."""
    tmp_path_factory.getbasetemp()  # pytest makes its own on first use, where the temporary directory is then
    with everybodys_folder() as folder:
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        yield folder


@pytest.fixture
def victim(shared: Path) -> Path:
    """A file of ours that a planted link leads to."""
    file = shared.parent / "bashrc"
    file.write_text(SECRET)
    return file


def leave_both(asked: str = "", job: int = JOB) -> WriteResult:
    """What a task leaves behind when a job fails: a report, and a line among the events."""
    with closing(RunFolder(asked, lambda: job)) as folder:
        left = folder.write({"report.txt": b"why\n"})
        event = folder.append(EVENTS, b"{}\n", make=True)
    assert event.where == left.where
    return left


def is_private(path: Path) -> bool:
    found = path.lstat()
    wanted = 0o700 if stat.S_ISDIR(found.st_mode) else 0o600
    return found.st_uid == US and stat.S_IMODE(found.st_mode) == wanted


# -- another user was there first --


@needs_root
def test_a_job_writes_to_nothing_that_another_user_has_planted(shared: Path, victim: Path, tmp_path: Path) -> None:
    """Anyone who asks a task learns the job's number, and with it the name of the folder."""
    faults = (DropMessage(str(worker(1)), str(server(0)), "Pull", 5, times=1),)

    def work(node: WorkerNode) -> None:
        spec = node.config.cluster
        train(
            node,
            TaskPlan(
                task=str(node.task),
                ps_hosts=spec.ps_hosts,
                worker_hosts=spec.worker_hosts,
                folder=str(tmp_path),
                steps=10,
            ),
        )

    with in_process_cluster(ClusterShape(1, 2), PlainStore, faults=faults) as cluster:
        wait_until(lambda: all(node.job for node in cluster.workers), 30, "the job has a number")
        number = f"{cluster.workers[0].job:016x}"
        for folder in (f"lockstep-{number}", f"lockstep-{US}/{number}"):
            nobody_does(f"mkdir -p {folder}; ln -s {victim} {folder}/{EVENTS}", shared)
        cluster.run(work)
        cluster.workers[0].watchdog.dump("a test")
        said = [text for text in cluster.said if text.startswith("the report and the journals are in ")]
    assert victim.read_text() == SECRET
    (where,) = {Path(text.rpartition(" ")[2]) for text in said}
    assert where.name == number
    assert where.parent.name.startswith(f"lockstep-{US}-")
    assert {path.name for path in where.iterdir()} == {EVENTS, "worker-0.snapshot.json"}
    assert all(is_private(path) for path in (where.parent, where, *where.iterdir()))


@needs_root
@pytest.mark.parametrize(
    "planted",
    [
        f"ln -s {{outside}} lockstep-{US}",
        f"ln -s nowhere lockstep-{US}",
        f"mkdir -p lockstep-{US}/{JOB:016x}; ln -s {{victim}} lockstep-{US}/{JOB:016x}/{EVENTS}",
        f"mkdir lockstep-{US}; ln -s {{outside}} lockstep-{US}/{JOB:016x}",
        f"mkfifo lockstep-{US}",
        f"touch lockstep-{US}",
        f"mkdir lockstep-{US} lockstep-{US}-0 lockstep-{US}-1; ln -s {{outside}} lockstep-{US}-00",
    ],
)
def test_a_name_that_is_taken_is_left_alone_and_the_report_is_in_a_safe_place(
    shared: Path, victim: Path, planted: str
) -> None:
    outside = shared.parent / "outside"
    outside.mkdir()
    nobody_does(planted.format(outside=outside, victim=victim), shared)
    theirs = {path: path.lstat().st_mtime_ns for path in shared.rglob("*")}
    left = leave_both()
    assert left.problem == ""
    assert left.where is not None
    assert left.where.parent.parent == shared
    assert left.where.parent not in theirs
    assert all(is_private(path) for path in (left.where.parent, left.where, *left.where.iterdir()))
    assert (victim.read_text(), list(outside.iterdir())) == (SECRET, [])
    assert all(path.lstat().st_mtime_ns == before for path, before in theirs.items())
    assert leave_both().where == left.where, "every task of the job finds the same folder"
    assert run_folders() == [left.where]


def test_tasks_of_one_job_share_a_folder_that_only_their_user_can_enter(shared: Path) -> None:
    mask = os.umask(0)
    try:
        left = leave_both()
    finally:
        os.umask(mask)
    assert left == leave_both() == WriteResult(shared / f"lockstep-{US}" / f"{JOB:016x}")
    assert left.where is not None
    assert (left.where / EVENTS).read_text() == "{}\n{}\n"
    assert all(is_private(path) for path in shared.rglob("*"))


def test_a_folder_of_ours_that_others_could_write_to_is_not_used(shared: Path) -> None:
    loose = shared / f"lockstep-{US}"
    loose.mkdir()
    loose.chmod(0o777)
    left = leave_both()
    assert left.where is not None
    assert left.where.parent.name.startswith(f"lockstep-{US}-")
    assert list(loose.iterdir()) == []


def test_clusters_that_never_formed_have_a_folder_each(shared: Path) -> None:
    first, second = leave_both(job=0).where, leave_both(job=0).where
    assert first is not None
    assert second is not None
    assert first != second
    assert first.parent == second.parent == shared / f"lockstep-{US}"


def test_a_notice_alone_leaves_no_folder_behind(shared: Path) -> None:
    with closing(RunFolder("", lambda: JOB)) as folder:
        assert folder.append(EVENTS, b"{}\n", make=False) == WriteResult(None)
    assert list(shared.iterdir()) == []


# -- a folder that the user has named --


def test_a_named_folder_is_made_for_its_user_alone_and_an_existing_one_keeps_its_mode(tmp_path: Path) -> None:
    named = tmp_path / "runs" / "one"
    assert leave_both(str(named)) == WriteResult(named)
    assert all(is_private(path) for path in (named, *named.iterdir()))
    named.chmod(0o775)
    assert leave_both(str(named)) == WriteResult(named)
    assert stat.S_IMODE(named.stat().st_mode) == 0o775
    link = tmp_path / "link"
    link.symlink_to(named)
    assert leave_both(str(link)) == WriteResult(link)


@needs_root
@pytest.mark.parametrize("planted", ["mkdir named", "ln -s {home} named"])
def test_a_named_folder_of_another_user_is_refused_and_the_report_is_in_a_safe_place(
    shared: Path, planted: str
) -> None:
    home = shared.parent / "home"
    home.mkdir()
    os.chown(home, SOMEBODY, SOMEBODY)
    nobody_does(planted.format(home=home), shared)
    with being(SOMEBODY):
        left = leave_both(str(shared / "named"))
    assert left.where == shared / f"lockstep-{SOMEBODY}" / f"{JOB:016x}"
    assert {path.name for path in left.where.iterdir()} == {EVENTS, "report.txt"}
    assert left.problem.startswith(f"no report is written to {shared / 'named'}: it ")
    assert left.problem.endswith(f"user {NOBODY}; give --train_dir a folder that you own")
    assert list((shared / "named").iterdir()) == list(home.iterdir()) == []


@needs_root
def test_in_a_container_root_writes_to_the_folder_of_the_hosts_user(shared: Path) -> None:
    nobody_does("mkdir named", shared)
    assert leave_both(str(shared / "named")) == WriteResult(shared / "named")


@needs_root
@pytest.mark.parametrize("plant", ["ln -s {victim}", "mkfifo", "cp {victim}; ln {name} other"])
def test_in_a_named_folder_no_link_is_followed_and_no_pipe_waited_for(shared: Path, victim: Path, plant: str) -> None:
    named = shared / "named"
    named.mkdir()
    named.chmod(0o777)
    command, _, then = plant.format(victim=victim, name=EVENTS).partition(";")
    nobody_does(f"{command} {EVENTS}; {then}", named)
    nobody_does(f"ln -s {victim} report.txt", named)
    with closing(RunFolder(str(named), lambda: JOB)) as folder:
        assert folder.write({"report.txt": b"why\n"}) == WriteResult(named)
        refused = folder.append(EVENTS, b"a line of theirs\n", make=True)
    assert refused.problem == f"cannot write to {named}: {EVENTS} is not a plain file of this user; remove it"
    assert victim.read_text() == SECRET
    assert is_private(named / "report.txt"), "the planted link is replaced by the file"
    assert (named / "report.txt").read_text() == "why\n"


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with closing(RunFolder(str(blocked / "below"), lambda: JOB)) as folder:
        assert folder.write({"a": b""}) == WriteResult(None, f"cannot write to {blocked / 'below'}: Not a directory")
    with closing(RunFolder("/dev/full", lambda: JOB)) as folder:
        assert folder.write({"a": b""}).problem.startswith("cannot write to /dev/full: ")


def test_a_temporary_directory_that_cannot_be_written_is_a_sentence_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with closing(RunFolder("", lambda: JOB)) as folder:
        problem = folder.write({"a": b""}).problem
    assert problem == f"cannot write to {tmp_path / 'gone'}: No such file or directory; set TMPDIR to another folder"


def test_files_are_whole_or_absent(tmp_path: Path) -> None:
    with closing(RunFolder(str(tmp_path / "new"), lambda: JOB)) as folder:
        folder.write({"a.txt": b"1", "b.txt": b"2"})
        (tmp_path / "new" / "c.txt").mkdir()
        assert folder.write({"c.txt": b"3"}).where is None
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["a.txt", "b.txt", "c.txt"]


# -- old folders --


def age(folder: Path | None, seconds: float) -> Path:
    assert folder is not None
    then = time.time() - seconds
    os.utime(folder, (then, then))
    return folder


def test_old_folders_of_dead_jobs_are_removed_when_a_new_one_is_made(shared: Path) -> None:
    first, second = leave_both(job=1).where, leave_both(job=2).where
    old, young = age(first, KEEP_SECONDS + 60), age(second, KEEP_SECONDS - 60)
    other = old.parent / "something else"
    other.mkdir()
    age(other, 2 * KEEP_SECONDS)
    leave_both(job=3)
    assert (old.exists(), young.exists(), other.exists()) == (False, True, True)


def test_of_many_folders_the_newest_are_kept(shared: Path) -> None:
    made = [age(leave_both(job=number).where, 1000 - number) for number in range(1, KEEP_FOLDERS + 1)]
    assert all(folder.exists() for folder in made)
    newest = leave_both(job=1000).where
    assert run_folders() == [newest, *reversed(made[1:])]


def test_the_folder_of_a_running_job_is_never_removed(shared: Path) -> None:
    """Even if the task that made it is gone: another task of the job holds it."""
    old = age(leave_both(job=1).where, 2 * KEEP_SECONDS)
    with closing(RunFolder("", lambda: 1)) as living:
        living.hold()
        leave_both(job=2)
        assert old.exists()
    leave_both(job=3)
    assert not old.exists()


def test_a_running_task_holds_the_folder_that_another_made(shared: Path) -> None:
    with in_process_cluster(ClusterShape(1, 1), PlainStore) as cluster:
        node = cluster.workers[0]
        wait_until(lambda: node.job != 0, 30, "the job has a number")
        old = leave_both(job=node.job).where

        def held() -> bool:
            return str(old) in {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}

        wait_until(held, 10, "the task holds the folder")
        age(old, 2 * KEEP_SECONDS)
        leave_both(job=2)
        assert old is not None
        assert old.exists()


# -- lockstep why --


@needs_root
def test_why_without_an_argument_reads_the_callers_own_folders_only(shared: Path) -> None:
    snapshot = json.dumps(frozen().task(PS0))
    for folder in (f"lockstep-{JOB:016x}", f"lockstep-{US}/{JOB:016x}", f"lockstep-{US}-0/{JOB:016x}"):
        nobody_does(f"mkdir -p {folder}; cat > {folder}/ps-0.snapshot.json <<'END'\n{snapshot}\nEND", shared)
    none = run_lockstep("why", timeout=20, environment={"TMPDIR": str(shared)})
    assert (none.code, none.stdout) == (2, "")
    assert none.stderr.startswith(
        "lockstep: no job of yours runs on this host, and no run folder of yours was found; write 'lockstep why HOST:"
    )
    with closing(RunFolder("", lambda: 1)) as own:
        own.write({"ps-0.snapshot.json": snapshot.encode()})
    nobody_does(f"touch lockstep-{JOB:016x} lockstep-{US} lockstep-{US}-0", shared)
    found = run_lockstep("why", "--json", timeout=20, environment={"TMPDIR": str(shared)})
    assert found.code == 3, found.stderr
    assert json.loads(found.stdout)["verdict"]["culprit"] == str(worker(1))


def test_links_and_pipes_among_the_files_of_a_run_are_left_out(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.json")
    os.mkfifo(tmp_path / "ps-0.snapshot.json")
    (tmp_path / "elsewhere").write_text(json.dumps(frozen().task(PS0)))
    (tmp_path / "ps-1.snapshot.json").symlink_to("elsewhere")
    found = read_folder(tmp_path)
    assert found.problems == [
        f"{name} is ignored: it is not a plain file"
        for name in ("ps-0.snapshot.json", "ps-1.snapshot.json", "report.json")
    ]
