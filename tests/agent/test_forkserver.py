"""The fork server: a replica must not notice that it was forked."""

from __future__ import annotations

import gzip
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from commands import ended
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from adaptdl_elastic.agent.machine.device_locks import is_locked
from adaptdl_elastic.agent.runtime.fork_server import Exited, ForkServer, Spawned
from adaptdl_elastic.agent.runtime.forked_child import Command, die_with
from adaptdl_elastic.agent.runtime.generation_store import GenerationStore
from adaptdl_elastic.protocol import uncaught_error
from adaptdl_elastic.protocol.channel import Channel
from adaptdl_elastic.protocol.messages import Finished, Stop

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer.start({**os.environ, "OMP_NUM_THREADS": "1"})
    yield server
    server.close()


class Runner:
    """Runs one command at a time and waits for its end."""

    def __init__(self, server: ForkServer, directory: Path) -> None:
        self.server, self.directory, self.number = server, directory, int(time.monotonic() * 1000)
        self.ended: dict[int, int] = {}  # exit codes by number

    def news(self, timeout: float = 200) -> list[Spawned | Exited]:
        assert select.select([self.server], [], [], timeout)[0], "the fork server is silent"
        news = self.server.receive()
        assert news is not None
        self.ended.update({item.id: item.exit_code for item in news if isinstance(item, Exited)})
        return news

    def start(
        self,
        mode: str,
        *argv: str,
        env: dict[str, str] | None = None,
        threads: int | None = None,
        reports: str = "",
        quiet: bool = False,
        devices: tuple[str, ...] = (),
    ) -> int:
        self.number += 1
        out = [(self.directory / name).open("w") for name in ("out", "err")]
        command = Command(mode, argv, str(self.directory), env or {}, threads, reports, quiet, devices)
        self.server.spawn(self.number, command, *(file.fileno() for file in out))
        for file in out:
            file.close()
        while True:
            for item in self.news():
                if isinstance(item, Spawned) and item.id == self.number:
                    return item.pid

    def wait(self) -> int:
        while self.number not in self.ended:
            self.news()
        return self.ended[self.number]

    def run(self, text: str, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        script = self.directory / "script.py"
        script.write_text(text)
        self.start("script", str(script), *arguments, env=env)
        return (self.wait(), *self.said())

    def said(self) -> tuple[str, str]:
        return (self.directory / "out").read_text(), (self.directory / "err").read_text()


@pytest.fixture
def runner(server: ForkServer, tmp_path: Path) -> Runner:
    return Runner(server, tmp_path)


def plainly(directory: Path, *arguments: str) -> tuple[int, str, str]:
    """What `python -u` does with the same script."""
    done = ended([sys.executable, "-u", *arguments], directory)
    return done.returncode, done.stdout, done.stderr


SAME = {
    "arguments, names and paths": """
import sys, os
print(sys.argv, __name__, __file__, sys.path[0], os.getcwd())
print(sys.modules["__main__"].__dict__ is globals(), __spec__, __builtins__)
""",
    "an error": """
def f():
    raise ValueError("boom")
f()
""",
    "an error with a cause": """
try:
    1 / 0
except ZeroDivisionError as e:
    raise RuntimeError("second") from e
""",
    "a syntax error": "def f(:\\n",
    "exit code": "import sys; sys.exit(3)",
    "exit message": "import sys; sys.exit('no way')",
    "exit without a code": "import sys; sys.exit()",
    "atexit and a thread": """
import atexit, threading, sys
atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
sys.stdout.write("no newline")
""",
    "what is left open, in order": """
import gzip, os, sys, tempfile
class Last:
    def __del__(self): print("finalized", os.path.basename("a/b"))
last = Last()
text = open("text", "w"); text.write("not flushed")
os.hidden = open("hidden", "wb"); os.hidden.write(b"by another module")
os.packed = gzip.open("packed.gz", "wt"); os.packed.write("with a trailer")
temporary = tempfile.NamedTemporaryFile(dir="."); os.environ["NAME"] = temporary.name
""",
    "streams of its own": """
import io, sys
class Tee:
    def __init__(self, stream): self.stream = stream
    def write(self, text): return self.stream.write(text)
    def flush(self): self.stream.flush()
sys.stdout = Tee(sys.stdout)
sys.stderr = io.StringIO()
print("to both")
""",
    "no streams": """
import sys
sys.stdout = sys.stderr = None
""",
    "a thread that never ends": """
import threading, time
def forever():
    while True: time.sleep(0.001); x.append(0); x.clear()
x = []
threading.Thread(target=forever, daemon=True).start()
print("end")
""",
    "a thread that reads and reads": """
import os, threading
ends = os.pipe()
threading.Thread(target=os.fdopen(ends[0]).readline, daemon=True).start()
print("end")
""",
    "what its own modules hold": """
from pathlib import Path
Path("keeps.py").write_text("class A:\\n    def __del__(self): print('finalized')\\na = A()\\n")
import keeps
""",
    "an exit code that is a shell's for Ctrl-C": "import sys; sys.exit(130)",
    "an exit code beyond a byte": "import sys; sys.exit(256 + 7)",
    "a broken exit": "import sys; sys.exit((1, 2))",
    "excepthook": """
import sys
sys.excepthook = lambda kind, error, trace: print("hook", kind.__name__, trace.tb_lineno)
raise KeyError(1)
""",
    "pickling what is defined here": """
import pickle
class A: pass
print(type(pickle.loads(pickle.dumps(A()))) is A)
""",
    "a process of its own by spawn": """
import multiprocessing as mp
def child(): print("child", __name__)
if __name__ == "__main__":
    p = mp.get_context("spawn").Process(target=child); p.start(); p.join(); print(p.exitcode)
""",
}


@pytest.mark.parametrize("name", SAME)
def test_a_script_runs_as_python_runs_it(runner: Runner, tmp_path: Path, name: str) -> None:
    found = runner.run(SAME[name], "a", "--b")
    script = str(tmp_path / "script.py")
    assert found == plainly(tmp_path, script, "a", "--b")


def test_files_left_open_reach_the_disk(runner: Runner, tmp_path: Path) -> None:
    assert runner.run(SAME["what is left open, in order"])[:2] == (0, "finalized b\n")
    assert (tmp_path / "text").read_text() == "not flushed"
    assert (tmp_path / "hidden").read_bytes() == b"by another module"
    assert gzip.decompress((tmp_path / "packed.gz").read_bytes()) == b"with a trailer"
    assert not list(tmp_path.glob("tmp*"))


def test_a_file_that_can_not_be_closed_is_given_up(runner: Runner, tmp_path: Path) -> None:
    """A daemon thread is in the middle of a write that nobody reads; the other files are closed."""
    text = """
import os, threading
from adaptdl_elastic.agent.runtime import forked_child
forked_child._STUCK = 0.5
stuck, ends = threading.Event(), os.pipe()
class Pipe(io.FileIO):
    def write(self, data):
        stuck.set()
        return super().write(bytes(1 << 20))
full = io.BufferedWriter(Pipe(ends[1], "w"))
threading.Thread(target=full.write, args=(bytes(1 << 20),), daemon=True).start()
stuck.wait()
print("end")
"""
    assert runner.run("import io" + text) == (0, "end\n", "")


def test_a_collective_that_ends_after_the_script_does_not_abort_it(runner: Runner, tmp_path: Path) -> None:
    """Torn down, the interpreter waits for it, and dies when its callback comes back to Python."""
    text = """
import atexit, sys, time, torch, torch.distributed as dist
from pathlib import Path
rank, ends = int(sys.argv[1]), Path("ends")
dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=rank, world_size=2)
dist.barrier()
if rank == 0:
    while not ends.exists(): time.sleep(0.001)
    time.sleep(0.3)  # into the middle of the other's end
work = dist.all_reduce(torch.ones(8), async_op=True)
atexit.register(ends.touch)
work.get_future().add_done_callback(lambda future: None)
print("end")
"""
    (tmp_path / "other.py").write_text(text)
    with subprocess.Popen([sys.executable, "other.py", "0"], cwd=tmp_path) as other:
        try:
            assert runner.run(text, "1") == (0, "end\n", "")
        finally:
            other.kill()


def test_a_module_runs_as_python_runs_it(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text(
        "import sys; print(__name__, __spec__.name, sys.argv); raise OSError('x')"
    )
    runner.start("module", "mod", "a")
    code, out, err = runner.wait(), *runner.said()
    expected = plainly(tmp_path, "-m", "mod", "a")
    assert (code, out) == expected[:2]
    assert err.splitlines()[-3:] == expected[2].splitlines()[-3:]
    assert "fork_server" not in err
    assert "child.py" not in err


@pytest.mark.parametrize("mode", ["script", "exec"])
def test_a_device_is_held_until_the_replica_has_ended(runner: Runner, mode: str) -> None:
    name, script = f"GPU-{uuid.uuid4()}", runner.directory / "script.py"
    script.write_text("open('go').read()\n")
    os.mkfifo(runner.directory / "go")
    command = [str(script)] if mode == "script" else [sys.executable, str(script)]
    runner.start(mode, *command, devices=(name,))
    with (runner.directory / "go").open("w"):  # the script reads now
        assert is_locked(name)
    assert runner.wait() == 0, runner.said()
    assert not is_locked(name)


def test_a_program_is_executed_plainly(runner: Runner) -> None:
    runner.start("exec", "sh", "-c", "echo $0 $X; exit 7", "name", env={"X": "y"})
    assert (runner.wait(), *runner.said()) == (7, "name y\n", "")


def test_a_program_that_is_not_there_is_said_in_one_line(runner: Runner) -> None:
    runner.start("exec", "/nowhere/at-all")
    assert runner.wait() == 127
    assert runner.said()[1] == "adaptdl-run: cannot run '/nowhere/at-all': No such file or directory\n"


def test_an_uncaught_interrupt_is_reported_as_one(runner: Runner, tmp_path: Path) -> None:
    code, out, err = runner.run("import atexit; atexit.register(print, 'bye'); raise KeyboardInterrupt")
    assert (code, out) == (-signal.SIGINT, "bye\n")
    assert err.splitlines()[-1] == "KeyboardInterrupt"


def test_the_error_file_is_the_one_torch_reads(runner: Runner, tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    code, _, _ = runner.run("raise ValueError('boom')", env={"TORCHELASTIC_ERROR_FILE": str(path)})
    failure = ProcessFailure(0, 1, code, str(path))
    assert failure.message["message"] == "ValueError: boom"
    assert "script.py" in failure.message["extraInfo"]["py_callstack"]
    assert "child.py" not in failure.message["extraInfo"]["py_callstack"]


QUIETLY = """
def f():
    raise ValueError("boom")
f()
"""


@pytest.mark.parametrize("hooked", [False, True], ids=["as it is", "with a hook of the script's own"])
def test_a_quiet_replica_leaves_its_traceback_to_the_agent(
    runner: Runner, tmp_path: Path, hooked: bool
) -> None:
    hook = "import sys\nsys.excepthook = lambda kind, error, trace: print('hook', error, file=sys.stderr)\n"
    text = (hook if hooked else "") + QUIETLY
    (tmp_path / "script.py").write_text(text)
    expected = plainly(tmp_path, "script.py")[2]
    runner.start("script", "script.py", reports=str(tmp_path), quiet=True)
    assert runner.wait() == 1
    assert runner.said() == ("", "")
    assert (tmp_path / uncaught_error.TRACEBACK).read_text() == expected
    found = uncaught_error.read(tmp_path)
    assert found is not None
    assert found.kind == f"ValueError at script.py:{5 if hooked else 3} in f"


def test_a_traceback_that_cannot_be_left_to_the_agent_is_written_to_stderr(
    runner: Runner, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(QUIETLY)
    runner.start("script", "script.py", reports=str(tmp_path / "gone"), quiet=True)
    assert runner.wait() == 1
    assert runner.said() == ("", plainly(tmp_path, "script.py")[2])


def test_an_error_of_a_process_that_a_replica_has_forked_is_not_the_replicas(
    runner: Runner, tmp_path: Path
) -> None:
    text = "import os\nif os.fork() == 0:\n    undefined_name\nos.wait()\n"
    (tmp_path / "script.py").write_text(text)
    runner.start("script", "script.py", reports=str(tmp_path), quiet=True)
    assert runner.wait() == 0
    assert "NameError" in runner.said()[1]
    assert uncaught_error.read(tmp_path) is None


ORPHAN = """
import os, signal, socket, sys
ours, theirs = socket.socketpair()
if os.fork() == 0:
    # The group of the replica is killed with it.
    os.setsid()
    ours.close()
    theirs.send(b"apart")
    try:
        data = theirs.recv(1)
        if not data:
            raise ConnectionResetError("the replica is gone")
        undefined_name
    except:
        sys.excepthook(*sys.exc_info())  # as multiprocessing.resource_sharer does
    with open("done", "w") as fifo:
        fifo.write("done")
    os._exit(0)
ours.recv(5)
if sys.argv[1] == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
ours.send(b"x")
os.wait()
"""


@pytest.mark.parametrize("how", ["dies", "lives"])
def test_a_child_that_outlived_a_killed_replica_prints_no_traceback(
    runner: Runner, tmp_path: Path, how: str
) -> None:
    os.mkfifo(tmp_path / "done")
    (tmp_path / "script.py").write_text(ORPHAN)
    runner.start("script", "script.py", how, reports=str(tmp_path), quiet=True)
    assert (tmp_path / "done").read_text() == "done"
    assert runner.wait() == (-signal.SIGKILL if how == "dies" else 0)
    assert ("Traceback" in runner.said()[1]) == (how == "lives")


def test_replicas_draw_different_random_numbers(runner: Runner) -> None:
    draw = "import random, numpy, torch; print(random.random(), numpy.random.rand(), torch.rand(1).item())"
    first, second = (runner.run(draw)[1].split() for _ in range(2))
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_the_server_is_warm_and_touches_nothing(runner: Runner) -> None:
    code, out, err = runner.run(
        "import sys, torch, os\n"
        "print('torch._dynamo' in sys.modules, torch.cuda.is_initialized(),"
        " torch.distributed.is_initialized(),"
        " len(os.listdir('/proc/self/task')), len(os.listdir('/proc/self/fd')))"
    )
    assert (code, err) == (0, "")
    assert out == "True False False 1 4\n"


def test_threads_are_set_in_the_replica(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import torch; print(torch.get_num_threads())")
    runner.start("script", str(tmp_path / "s.py"), threads=3)
    assert (runner.wait(), runner.said()[0]) == (0, "3\n")


@pytest.mark.skipif(not hasattr(TCPStore, "list_keys"), reason="this torch's store does not list its keys")
def test_nothing_secret_is_in_the_store_where_replicas_meet(server: ForkServer) -> None:
    kept = GenerationStore("127.0.0.1", None, server)
    record = kept.open(1)
    stranger = TCPStore("127.0.0.1", record.port, is_master=False)
    assert [key for key in stranger.list_keys() if not key.startswith("init/")] == []
    kept.close()


def test_a_signal_reaches_the_whole_group(runner: Runner, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "ready")
    pid = runner.start("exec", "sh", "-c", "sleep 1000 & echo $! > ready; wait")
    grandchild = psutil.Process(int((tmp_path / "ready").read_text()))
    assert os.getpgid(grandchild.pid) == pid != os.getpgid(0)
    runner.server.signal(runner.number, signal.SIGKILL)
    assert runner.wait() == -signal.SIGKILL
    psutil.wait_procs([grandchild], timeout=60)
    assert not grandchild.is_running()


def the_end(runner: Runner) -> tuple[int, bool]:
    """Exit code of the replica, and whether a signal had been delivered to it."""
    while True:
        for item in runner.news():
            if isinstance(item, Exited) and item.id == runner.number:
                return item.exit_code, item.signalled


def test_an_end_tells_that_a_signal_came_before_it(runner: Runner) -> None:
    runner.start("exec", "sleep", "1000")
    runner.server.signal(runner.number, signal.SIGTERM)
    assert the_end(runner) == (-signal.SIGTERM, True)


def test_an_end_tells_that_a_signal_came_after_it(runner: Runner, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    replica = os.pidfd_open(runner.start("exec", "sh", "-c", "read line < go"))
    runner.server.process.send_signal(signal.SIGSTOP)
    try:
        (tmp_path / "go").write_text("go\n")
        assert select.select([replica], [], [], 60)[0], "the replica has not ended"
        runner.server.signal(runner.number, signal.SIGTERM)
    finally:
        runner.server.process.send_signal(signal.SIGCONT)
        os.close(replica)
    assert the_end(runner) == (0, False)


@pytest.mark.parametrize(
    ("script", "stopped", "said"),
    [
        ("pass", False, True),
        ("import sys; sys.exit(0)", False, True),
        ("import sys; sys.exit(3)", False, False),
        ("pass", True, False),
        (
            "import os\nif not (pid := os.fork()): raise SystemExit(0)\nos.waitpid(pid, 0)\nos._exit(0)",
            False,
            False,
        ),
    ],
    ids=["ends", "exits", "fails", "was asked to stop", "a fork of its own ends"],
)
def test_a_script_that_comes_to_its_end_by_itself_says_so(
    server: ForkServer, tmp_path: Path, request: pytest.FixtureRequest, script: str, stopped: bool, said: bool
) -> None:
    runner, (channel, theirs) = Runner(server, tmp_path), Channel.pair()
    request.addfinalizer(channel.close)
    (tmp_path / "script.py").write_text(script)
    if stopped:
        channel.send(Stop("why"))
    server.spawn(runner.number, Command("script", ("script.py",), str(tmp_path)), channel=theirs.fileno())
    theirs.close()
    runner.wait()
    assert list(channel.reports()) == ([Finished()] if said else [])


def test_a_signal_right_behind_the_start_is_not_lost(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import time; time.sleep(1000)")
    command = Command("script", (str(tmp_path / "s.py"),), str(tmp_path))
    numbers = range(runner.number + 1, runner.number + 21)
    for number in numbers:
        runner.server.spawn(number, command)
        runner.server.signal(number, signal.SIGTERM)
    while not set(numbers) <= set(runner.ended):
        runner.news()
    assert runner.ended == dict.fromkeys(numbers, -signal.SIGTERM)


@contextmanager
def alive(fifo: Path) -> Iterator[Callable[[], None]]:
    """A process that opens the FIFO for writing says a line; the function waits until it is dead."""
    os.mkfifo(fifo)
    life = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)

    def dead() -> None:
        assert select.select([life], [], [], 60)[0], "it lives"
        assert os.read(life, 1) == b""

    try:
        yield dead
    finally:
        os.close(life)


STUBBORN = "trap '' TERM; exec 3> life; echo > begun; exec sleep 1000"


@pytest.mark.parametrize("code", [0, 1])
def test_a_stubborn_child_of_an_ended_replica_is_killed(runner: Runner, tmp_path: Path, code: int) -> None:
    os.mkfifo(tmp_path / "begun")
    with alive(tmp_path / "life") as dead:
        runner.start("exec", "sh", "-c", f"({STUBBORN}) & read line < begun; exit {code}")
        assert runner.wait() == code
        dead()


def test_nothing_of_a_replica_survives_the_server(tmp_path: Path) -> None:
    server = ForkServer.start(modules=())
    runner = Runner(server, tmp_path)
    os.mkfifo(tmp_path / "begun")
    with alive(tmp_path / "life") as dead:
        runner.start("exec", "sh", "-c", f'setsid sh -c "{STUBBORN}" & read line < begun; exit 0')
        assert runner.wait() == 0
        server.close(timeout=200)
        dead()
    assert server.process.returncode == 0


UPLOADER = "trap 'echo done >&3; exit 0' TERM; exec 3> life; echo > begun; sleep 1000 & wait"
# a busy machine may run a trap later than 2 s after its signal
PATIENT = "from adaptdl_elastic.agent.runtime import fork_server\nfork_server._GRACE = 60.0\n"


@pytest.mark.parametrize("then", ["read line < go", "exec sleep 1000"])
def test_a_detached_process_can_end_in_an_orderly_way(tmp_path: Path, then: str) -> None:
    (tmp_path / "patient.py").write_text(PATIENT)
    server = ForkServer.start({**os.environ, "PYTHONPATH": str(tmp_path)}, modules=("patient",))
    runner = Runner(server, tmp_path)
    (tmp_path / "uploader").write_text(UPLOADER)
    for name in ("begun", "life", "go"):
        os.mkfifo(tmp_path / name)
    life = os.open(tmp_path / "life", os.O_RDONLY | os.O_NONBLOCK)
    try:
        runner.start("exec", "sh", "-c", f"setsid sh uploader & {then}")
        assert (tmp_path / "begun").read_text() == "\n"
        if "go" in then:
            (tmp_path / "go").write_text("\n")
            assert runner.wait() == 0
        server.close(timeout=200)
        assert os.read(life, 10) == b"done\n"
        assert os.read(life, 1) == b""  # and nothing of it lives
    finally:
        os.close(life)


@pytest.mark.parametrize("how", ["the agent goes", "the server is killed"])
def test_replicas_end_with_the_agent_and_with_the_server(tmp_path: Path, how: str) -> None:
    server = ForkServer.start(modules=())
    runner = Runner(server, tmp_path)
    replica = psutil.Process(runner.start("exec", "sleep", "1000"))
    if how == "the server is killed":
        server.process.kill()
        assert server.receive() is None
    server.close()
    psutil.wait_procs([replica], timeout=60)
    assert not replica.is_running()
    assert server.process.poll() is not None


@pytest.mark.exhaustive
def test_a_replica_whose_server_died_before_it_could_ask_ends() -> None:
    pid = os.fork()
    if pid == 0:
        die_with(1 << 30)  # the parent that it has by now is another one
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
