"""The command line: torchrun's options and ours."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from commands import ended
from forbidden import forbidden
from hypothesis import given
from hypothesis import strategies as st

import adaptdl_elastic
from adaptdl_elastic import _torch_versions
from adaptdl_elastic.agent import cli
from adaptdl_elastic.agent.own_records import job_spec
from adaptdl_elastic.agent.runtime.replica_environment import SharePath
from adaptdl_elastic.agent.terminal import run_options, run_parser
from adaptdl_elastic.agent.terminal.replica_output import StreamOptionError, Streams
from adaptdl_elastic.agent.terminal.run_options import MeetingPoint
from adaptdl_elastic.agent.terminal.torchrun_options import WITHOUT_MEANING
from adaptdl_elastic.rendezvous.schema.records import JobSpec, decode, encode


def parse(*arguments: str, **environ: str) -> run_options.RunOptions:
    return run_options.parse([*arguments, __file__], environ)


# options of torchrun that are refused: the completions would be those of `torchrun`
WITHDRAWN = {"print_completion"}


@pytest.mark.parametrize("variable", [None, "1"])
def test_torchruns_options_are_those_of_the_installed_torch(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give each option to both parsers, in each of its spellings; also where `PET_` variables set it."""
    from torch.distributed.run import get_args_parser

    named = {
        action.dest: action
        for action in get_args_parser()._actions
        if action.dest not in WITHDRAWN | {"help"}
    }
    for dest in named if variable else ():
        monkeypatch.setenv(f"PET_{dest.upper()}", variable or "")
    theirs, mine = get_args_parser(), run_parser.parser()
    expected, found = vars(theirs.parse_args(["script"])), vars(mine.parse_args(["script"]))
    different = {name for name in named if expected[name] != found[name]}
    listed = {declaration.split()[0][2:].replace("-", "_") for declaration in WITHOUT_MEANING}
    # a job restarts by itself; older torches name a port, and no template
    assert different <= listed | {"max_restarts", "master_port", "log_line_prefix_template"}
    for dest, action in named.items():
        for option in action.option_strings:
            values = [] if action.nargs == 0 else [action.choices[0] if action.choices else "7"]
            words = [option, *map(str, values), "script"]
            expected, found = theirs.parse_args(words), mine.parse_args(words)
            assert found.training_script == "script"
            if dest not in listed or not isinstance(getattr(expected, dest), list):
                assert getattr(found, dest) == getattr(expected, dest), words
            if action.choices:
                with pytest.raises(run_parser.OptionError, match="invalid choice"):
                    mine.parse_args([option, "7", "script"])


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("2.7.1+cu126", "this is torch 2.7.1+cu126: pip install 'torch >= 2.8'"),
        (None, "this Python has no torch: pip install 'torch >= 2.8'"),
    ],
)
def test_a_torch_that_is_missing_or_too_old_ends_the_command_in_one_line(
    version: str | None, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_torch_versions, "installed", lambda: version)
    assert cli.main(["--help"]) == 1
    needed = f"adaptdl-elastic {adaptdl_elastic.__version__} needs torch >= 2.8"
    assert capsys.readouterr().err == f"adaptdl-run: error: {needed}, and {told}\n"


@pytest.mark.parametrize("version", ["2.8.0", "2.10.0a0+git1234", "2.14.1+cu130", "3.0"])
def test_later_torches_are_taken(version: str) -> None:
    assert _torch_versions.why_not(version) is None


NOT_STANDALONE: dict[str, object] = {"standalone": False}
AT_1234, C10D = {"PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": "1234"}, "--rdzv-backend=c10d"
TO_THE_SCRIPT = "S --nnodes x -- -m --master-port 1234 --rdzv-conf=x"


@pytest.mark.parametrize(
    ("line", "environ", "expected"),
    [
        ("S", {}, {"standalone": True, "of_one_machine": True, "slots": 1, "max_restarts": 3}),
        ("S", {}, {"job": "test_options", "checkpoint_path": str(Path.cwd() / ".adaptdl" / "test_options")}),
        ("S", {}, {"line_prefix": None, "meeting_point": None, "node_type": None, "cluster": "default"}),
        ("--nproc-per-node=1:4 S", {}, {"min_slots": 1, "slots": 4, "cores": len(os.sched_getaffinity(0))}),
        ("--nproc-per-node=4 S", {"OMP_NUM_THREADS": "3"}, {"min_slots": 4, "slots": 4, "cores": 0}),
        ("--rdzv-endpoint=unix:/s --nnodes=1 S", {}, {**NOT_STANDALONE, "of_one_machine": True}),
        ("--rdzv-endpoint=unix:/s --nnodes=1 S", {}, {"endpoint": "unix:/s"}),
        ("--rdzv-endpoint=etcd0 S", {}, {"of_one_machine": False}),
        ("--etcd=a:1 --nnodes=1:8 --rdzv-id=x S", {}, {**NOT_STANDALONE, "endpoint": "a:1", "max_nodes": 8}),
        ("--rdzv-endpoint=a:1 --rdzv-id=x S", {}, {**NOT_STANDALONE, "endpoint": "a:1", "job": "x"}),
        ("--nnodes=1:2 S", {"ADAPTDL_ETCD": "e:1"}, {"endpoint": "e:1"}),
        ("--log-line-prefix-template='${rank}: ' S", {}, {"line_prefix": "${rank}: "}),
        ("--checkpoint-interval=0 S", {}, {"checkpoint_interval": 0}),
        ("S", {"ADAPTDL_CLUSTER": "night"}, {"cluster": "night"}),
        ("--cluster=day S", {"ADAPTDL_CLUSTER": "night"}, {"cluster": "day"}),
        ("--node-type='A100 (40 GB)' S", {}, {"node_type": "A100 (40 GB)"}),
        ("--standalone S", {"ADAPTDL_NODE_TYPE": "slow"}, {"node_type": "slow"}),
        # shortened, where ours begin with the same letters, too: --node-name, --no-preempt
        ("--standalon S", {}, {"standalone": True}),
        ("--nproc=2 S", {}, {"slots": 2}),
        ("--nproc_per=2 S", {}, {"slots": 2}),
        ("--redirect=3 S", {}, {"redirects": "3"}),
        ("--max-r=7 S", {}, {"max_restarts": 7}),
        ("--rdzv_i=night S", {}, {"job": "night"}),
        ("--log-d=logs S", {}, {"log_dir": Path("logs")}),
        ("--checkpoint-int=7 S", {}, {"checkpoint_interval": 7.0}),
        ("--no-p sh", {}, {"mode": "exec"}),
        ("--no-pre S", {}, {"preemptible": False}),
        ("-mt 3 --max-r 7 json", {}, {"mode": "module", "tee": "3", "max_restarts": 7, "command": ("json",)}),
        # torchrun's ways to be alone, and to meet
        (f"--nnodes=1 {C10D} --rdzv-endpoint=localhost:0 S", {"ADAPTDL_ETCD": "e:1"}, {"endpoint": None}),
        (f"--nnodes=1 {C10D} --rdzv-endpoint=localhost:0 S", {"ADAPTDL_ETCD": "e:1"}, {"standalone": True}),
        ("--rdzv-endpoint=127.0.0.1:0 S", {"PET_RDZV_BACKEND": "c10d"}, {"standalone": True}),
        ("--master-port=1234 S", {}, {"meeting_point": MeetingPoint(None, 1234)}),
        ("--master_addr=a --master_port=1234 S", {}, {"meeting_point": MeetingPoint("a", 1234)}),
        ("--master-addr=[::1] --master-port=1234 S", {}, {"meeting_point": MeetingPoint("::1", 1234)}),
        ("--master-addr=a --nnodes=1:2 --etcd=e:1 S", {}, {"meeting_point": MeetingPoint("a", 29500)}),
        ("S", AT_1234, {"meeting_point": MeetingPoint("localhost", 1234)}),
        ("--standalone S", AT_1234, {"meeting_point": None}),
        ("--standalone --master-port=99 S", AT_1234, {"meeting_point": MeetingPoint(None, 99)}),
        # what follows the script is the script's; to argparse --ma is an ambiguous option
        (f"--standalone {TO_THE_SCRIPT}", {}, {"command": (__file__, *TO_THE_SCRIPT.split()[1:])}),
        ("-r 0 S --ma x", {}, {"command": (__file__, "--ma", "x")}),
        # without a note
        ("--max-restarts=2 --role=x S", {}, {"max_restarts": 2}),
        ("--nproc-per-node=1:2 --replicas=1:2 S", {}, {}),
        ("--nproc-per-node=2 --replicas=2:2 S", {}, {}),
        ("--nproc-per-node=2 --local-ranks-filter=1,7 S", {}, {}),
    ],
)  # fmt: skip
def test_options_that_have_an_effect_are_taken_without_a_note(
    line: str, environ: dict[str, str], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """S stands for a script that exists."""
    for name in (name for name in environ if name.startswith("PET_")):
        monkeypatch.setenv(name, environ[name])
    found = run_options.parse([__file__ if word == "S" else word for word in shlex.split(line)], environ)
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.notes == ()


@pytest.mark.parametrize(
    ("line", "environ", "notes"),
    [
        (
            "--rdzv-backend=etcd --node_rank 1 --start-method=fork",
            {},
            [f"--{name} has no effect: " for name in ("rdzv-backend", "start-method", "node-rank")],
        ),
        (
            "--nproc-per-node=2 --replicas=1:2",
            {},
            [
                "--replicas=1:2 never means fewer than 2 replicas, also after a death: --nproc-per-node=2 is "
                "the fewest of a node (1:2 lets them be fewer)"
            ],
        ),
        ("--shutdown-timeout=5", {}, ["--shutdown-timeout has no effect: "]),
        ("--numa-binding=node", {}, ["--numa-binding has no effect: "]),
        ("--duplicate-stdout-filters=a", {}, ["--duplicate-stdout-filters has no effect: "]),
        ("--logs_specs=x", {}, ["--logs-specs has no effect: "]),
        (
            "",
            {"PET_NODE_RANK": "1", "PET_RDZV_CONF": "", "PET_ROLE": "x"},
            ["PET_NODE_RANK has no effect: the coordinator gives out ranks"],
        ),
        ("--node-rank=1", {"PET_NODE_RANK": "1"}, ["--node-rank has no effect: "]),
        ("--node-=1", {}, ["--node-rank has no effect: "]),
        (
            "--rdzv-backend=c10d --rdzv-endpoint=localhost:29400",
            {},
            ["--rdzv-endpoint=localhost:29400 has no effect with --rdzv-backend=c10d"],
        ),
        ("--master-addr=localhost", {}, ["--master-addr has no effect without --master-port"]),
        (
            "--nproc-per-node=2 --local-ranks-filter=7",
            {},
            ["--local-ranks-filter=7 shows nothing: local ranks here are 0 to 1"],
        ),
        ("--node-rank 1 S --node-rank 1", {}, ["--node-rank has no effect: "]),
    ],
)
def test_each_option_or_variable_without_effect_gets_one_line(
    line: str, environ: dict[str, str], notes: list[str]
) -> None:
    words = [__file__ if word == "S" else word for word in shlex.split(line)]
    found = run_options.parse(words if __file__ in words else [*words, __file__], environ)
    assert found.standalone
    for told, begins in zip(found.notes, notes, strict=True):
        assert told.startswith(begins)


@pytest.mark.parametrize("way", ["--nnodes=1:2 localhost:29400", "--nnodes=1 etcd0:2379"])
def test_torchruns_backend_with_an_endpoint_that_may_be_an_etcd_is_that_etcd(way: str) -> None:
    nodes, endpoint = way.split()
    found = parse(nodes, "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
    assert (found.standalone, found.endpoint) == (False, endpoint)


def test_the_help_says_what_holds_here() -> None:
    text = " ".join(run_parser.parser().format_help().split())
    for wrong in ("C10d", "supported values", "before failing", "explicitly set values are ignored"):
        assert wrong not in text
    for part in (
        "MIN:MAX",
        "one node, without an etcd",
        "(default 3; fewer if the same error comes twice after the same step)",
        "(default 120)",
        "usage: adaptdl-run [options] SCRIPT",
    ):
        assert part in text
    ours, theirs = text.index("--checkpoint-path"), text.index("--nproc-per-node")
    assert ours < theirs < text.index("that have no effect here") < text.index("--node-rank")


def test_weight_and_preemption_reach_the_spec_of_the_job() -> None:
    plain = job_spec(parse("--standalone"))
    assert (plain.weight, plain.preemptible, plain.avoid_preemptible_nodes) == (1.0, True, False)
    found = job_spec(parse("--standalone", "--weight=2.5", "--no-preempt", "--avoid-preemptible-nodes"))
    assert (found.weight, found.preemptible, found.avoid_preemptible_nodes) == (2.5, False, True)


def test_arguments_that_are_no_utf_8_are_in_the_record_as_escapes() -> None:
    spec = job_spec(run_options.parse([__file__, "caf\udce9"], {}))
    assert decode(JobSpec, encode(spec), "") == spec
    assert spec.command[1] == r"caf\xe9"


@pytest.mark.parametrize(
    ("line", "said", "remedy"),
    [
        ("--nnodes=0 S", "--nnodes=0", "as in --nnodes=1:8"),
        ("--nnodes=1:2:3 S", "--nnodes=1:2:3", "as in --nnodes=1:8"),
        ("--nproc-per-node=2:1 S", "--nproc-per-node=2:1", "as in --nproc-per-node=1:8"),
        ("--nproc-per-node=-1 S", "--nproc-per-node=-1", "as in --nproc-per-node=1:8"),
        ("--cluster=a/b S", "--cluster 'a/b'", "letters, digits"),
        ("'--rdzv-id=a b' S", "--rdzv-id 'a b'", "letters, digits"),
        ("--etcd=a:1 --rdzv-endpoint=b:1 S", "--etcd a:1 and --rdzv-endpoint b:1", "give one"),
        ("--standalone --nnodes=2 S", "--nnodes=2 asks for more", "give --rdzv-endpoint HOST:PORT"),
        ("--nnodes=2 S", "--nnodes=2", "--rdzv-endpoint HOST:PORT"),
        ("--checkpoint-timeout=0 S", "--checkpoint-timeout=0", "positive number of seconds"),
        ("--checkpoint-interval=nan S", "--checkpoint-interval=nan", "0 switches it off"),
        ("--no-python -m S", "--no-python and --module", "exclude each other"),
        ("-m no_such.module S", "there is no module 'no_such'", "and none is installed"),
        ("-m .module S", "there is no module ''", "and none is installed"),
        ("--local-ranks-filter=a S", "--local-ranks-filter=a", "as in 0,1"),
        ("--signals-to-handle=SIGTERM,USR1 S", "'USR1' is not a signal", "as in SIGTERM,SIGINT"),
        ("--signals-to-handle=SIGKILL S", "'SIGKILL' is not a signal that can be handled", "as in SIGTERM"),
        ("--master-port=0 S", "--master-port=0", "between 1 and 65535"),
        ("--port-range=9:3 S", "--port-range=9:3", "as in 29500:29600"),
        ("--weight=0 S", "--weight=0", "must be above 0"),
        ("--gpus-per-replica=0 S", "--gpus-per-replica=0", "must be between 1 and 1024"),
        ("--weight=nan S", "--weight=nan", "must be above 0"),
        ("--hang-timeout=inf S", "--hang-timeout=inf", "0 switches it off"),
        ("--max-restarts=-1 S", "--max-restarts=-1", "0 means none"),
        ("--replicas=1:9999999999 S", "--replicas=1:9999999999", "as in --replicas=1:8"),
        ("--weight=1e+09 S", "--weight=1e+09", "at most 1e+06; the default is 1"),
        ("--nnodes=8:1 S", "--nnodes=8:1", "--nnodes=1:8"),
        ("--nnodes=1:8 S", "--nnodes=1:8", "--rdzv-endpoint HOST:PORT"),
        # torch, which may know the word, is asked in another process
        pytest.param(
            "--nproc-per-node=some S",
            "--nproc-per-node=some",
            ": give a number, MIN:MAX, auto, gpu or cpu",
            marks=pytest.mark.processes,
        ),
        ("--nosuch S", "--nosuch", "--help"),
        ("--nnode-range=3 S", "--nnode-range", "did you mean --"),
        ("--nodes=1 S", "--nodes=1", "did you mean --"),
        ("--rdzv-endpont=e:1 S", "--rdzv-endpont", "did you mean --"),
        ("--log=x S", "ambiguous option: --log", "--logs-specs"),
        ("--print-completion=bash S", "--print-completion", "--help"),
        ("", "SCRIPT", ""),
        ("missing.py", "there is no script 'missing.py' in ", ": give its path"),
        ("--no-python nosuchprogram", "nosuchprogram", ""),
        ("--tee=9 S", "--tee=9", "0:3,1:2"),
        ("--port-range=1:2 S", "--port-range=1:2", "as in 29500:29600"),
        ("--rescale-timeout=inf S", "--rescale-timeout=inf", "finite, positive number of seconds"),
        ("--checkpoint-interval=-1 S", "--checkpoint-interval=-1", "0 switches it off"),
        ("--rdzv-endpoint=unix:/run/store --nnodes=1:2 S", "and --nnodes allows 2 nodes", ""),
        ("--rdzv-endpoint=unix:store S", "unix:/path", ""),
        ("'--node-type=a+b' S", "--node-type='a+b'", "give up to 64 letters"),
    ],
)
def test_a_command_line_that_cannot_be_used_is_refused_with_what_was_given_and_what_to_give(
    line: str, said: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """S stands for a script that exists."""
    assert cli.main([__file__ if word == "S" else word for word in shlex.split(line)]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("adaptdl-run: error: ")
    assert said in told
    assert remedy in told


def test_a_directory_is_a_script_only_with_a_main_module(tmp_path: Path) -> None:
    with pytest.raises(run_parser.OptionError, match=r"is a directory without a __main__\.py: name a script"):
        run_options.parse([str(tmp_path)], {})
    (tmp_path / "__main__.py").touch()
    assert run_options.parse([str(tmp_path)], {}).mode == "script"


def test_torchruns_variables_are_read_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "7")
    assert parse().max_restarts == 7
    assert parse("--max-restarts=2").max_restarts == 2
    monkeypatch.setenv("PET_STANDALONE", "true")
    with pytest.raises(ValueError, match="PET_STANDALONE=true must be 0 or 1"):
        parse()
    monkeypatch.delenv("PET_STANDALONE")
    monkeypatch.setenv("PET_MAX_RESTARTS", "many")
    with pytest.raises(run_parser.OptionError, match="many"):
        parse()


@given(st.text(max_size=12))
def test_no_text_crashes_the_small_parsers(text: str) -> None:
    for parser in (run_options.parse_ports, lambda t: run_options.parse_range("--nnodes", t)):
        try:
            low, high = parser(text)
        except run_parser.OptionError:
            continue
        assert 1 <= low <= high
    with suppress(StreamOptionError):
        Streams.parse("--tee", text)


def test_streams_are_torchruns() -> None:
    from torch.distributed.elastic.multiprocessing import Std

    for text in ("0", "1", "2", "3", "0:3", "0:1,1:2"):
        mine, theirs = Streams.parse("--tee", text), Std.from_str(text)
        for rank in (0, 1, 2):
            expected = theirs if isinstance(theirs, Std) else theirs.get(rank, Std.NONE)
            assert (mine.has(rank, 1), mine.has(rank, 2)) == (
                bool(expected & Std.OUT),
                bool(expected & Std.ERR),
            )


def test_the_directory_that_replicas_share_is_closed_to_other_users(tmp_path: Path) -> None:
    runtime = tmp_path / "adaptdl-0"
    share = SharePath({}, "job", runtime)
    assert [found.stat().st_mode & 0o777 for found in (runtime, share.path)] == [0o700, 0o700]
    share.close(done=False)


def test_the_shared_directory_goes_with_the_job_or_after_a_day_without_an_agent(tmp_path: Path) -> None:
    used, left = SharePath({}, "used", tmp_path), SharePath({}, "left", tmp_path)
    left.close(done=False)  # as when its agent is killed
    second = SharePath({}, "used", tmp_path)
    for share in (used, left):
        os.utime(share.path, (0, 0))
    second.close(done=True)
    SharePath({}, "another", tmp_path).close(done=True)
    assert [path.name for path in tmp_path.iterdir()] == ["share-used"], "its first agent still runs"
    used.close(done=True)
    assert list(tmp_path.iterdir()) == []
    given = SharePath({"ADAPTDL_SHARE_PATH": str(tmp_path / "given")}, "job", tmp_path)
    given.close(done=True)
    assert given.path.is_dir()


@pytest.mark.parametrize("endpoint", ["a b:1", "host:port", "http://host/path", "host:0", "host:99999"])
def test_a_malformed_endpoint_is_a_bad_option(endpoint: str) -> None:
    for arguments, environ in (([f"--etcd={endpoint}"], {}), (["--nnodes=1:2"], {"ADAPTDL_ETCD": endpoint})):
        with pytest.raises(run_parser.OptionError, match="endpoint"):
            parse(*arguments, **environ)


def test_a_script_below_a_directory_that_may_not_be_entered(tmp_path: Path) -> None:
    with (
        forbidden(tmp_path / "no") as folder,
        pytest.raises(run_parser.OptionError, match="cannot be read: Permission denied"),
    ):
        run_options.parse([str(folder / "there")], {})


def test_a_level_of_logs_that_is_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("ADAPTDL_LOGLEVEL", "verbose")
    assert cli.main([__file__]) == 2
    assert capsys.readouterr().err == (
        "adaptdl-run: error: ADAPTDL_LOGLEVEL is 'verbose': write DEBUG, INFO, WARNING or ERROR\n"
    )


@pytest.mark.processes
def test_a_new_field_of_a_job_is_written_in_two_files(tmp_path: Path) -> None:
    for name in ("adaptdl_elastic", "agent", "autoscaler", "rendezvous"):
        shutil.copytree(Path(__file__).parents[2] / name, tmp_path / name, symlinks=True)
    for name, before, line in (
        ("rendezvous/schema/records.py", "    most_weight:", "    new_field: int = 7\n"),
        ("agent/terminal/run_parser.py", '    "--no-autoscale":', '    "--new-field N=7": "",\n'),
    ):
        text = (tmp_path / name).read_text()
        assert text.count(before) == 1
        (tmp_path / name).write_text(text.replace(before, line + before))
    (tmp_path / "train.py").write_text("")
    way = """
from adaptdl_elastic.agent.own_records import job_spec
from adaptdl_elastic.agent.terminal.run_options import parse
from adaptdl_elastic.rendezvous.schema.records import JobSpec, decode, encode
from adaptdl_elastic.rendezvous.schema.submissions import Submission
spec = decode(JobSpec, encode(job_spec(parse(["--new-field=9", "train.py"]))), "")
more = {"owner": "eve", "mode": "script", "bundle": "0" * 64}
open("job", "w").write(encode(Submission(**{**vars(spec), **more})))
print(spec.new_field, parse(["--spec", "job"]).new_field)
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = ended([sys.executable, "-c", way], tmp_path, env=environment)
    assert done.stdout == "9 9\n", done.stderr
