"""What cannot be simulated is said in one line that names what was given and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from simulated_market import read_market
from simulator.application import read_application
from simulator.simulate_command import simulate
from simulator.synthetic import write_applications
from simulator.workload import WorkloadError, read_workload

from adaptdl_elastic.autoscaler.commands.cluster import coordinator

SMALL = ["--generate", "3", "--hours", "0.1", "--nodes", "2", "--rescale-cost", "1"]


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(simulate, arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code != 0
    lines = [line for line in result.output.splitlines() if not line.startswith(("Usage:", "Try ")) and line]
    assert len(lines) == 1, result.output
    return lines[0]


@pytest.mark.parametrize("option", ["--plot", "--save"])
def test_a_place_that_can_not_be_written_is_refused_before_anything_is_simulated(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a simulation that begins fails
    monkeypatch.setattr("simulator.simulate_command.Simulation", None)
    (tmp_path / "file").write_text("")
    line = refused(*SMALL, option, str(tmp_path / "file" / "x.png"))
    assert line.startswith(f"simulate: {option} {tmp_path}/file/x.png: ")


def test_a_picture_in_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "run.png"
    result = CliRunner().invoke(simulate, [*SMALL, "--plot", str(path)])
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_no_known_kind() -> None:
    assert "x.txt: must end in .png, .svg or .pdf" in refused(*SMALL, "--plot", "x.txt")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        (option, value)
        for option in ("--rescale-cost", "--interval", "--hours", "--fairness", "--declared-sigma")
        for value in ("nan", "inf", "-inf")
    ]
    + [
        ("--fairness", "-1000"),
        ("--fairness", "2"),
        ("--seed", "-1"),
        ("--declared-sigma", "1000"),
        ("--hours", "1e300"),
        ("--interval", "1e300"),
    ],
)
def test_numbers_that_are_none(option: str, value: str) -> None:
    line = refused(*SMALL, option, value)
    assert option in line
    assert value in line or "is not in the range" in line


def test_a_coordinator_is_as_fair_as_a_simulation_can_be() -> None:
    result = CliRunner().invoke(coordinator, ["--etcd", "127.0.0.1:1", "--fairness", "-1000"])
    assert result.exit_code == 2
    assert "-1000.0 is not in the range -20<=x<=1" in result.output


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("option", ["--interval", "--fairness", "--default-pause"])
def test_a_coordinator_asked_for_numbers_that_are_none(option: str, value: str) -> None:
    result = CliRunner().invoke(coordinator, ["--etcd", "127.0.0.1:1", option, value])
    assert result.exit_code == 2
    assert f"Invalid value for '{option}': {value} is not a finite number" in result.output


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("slots", [1, 4, 12])
def test_made_up_traces_serve_a_cluster_of_any_size(nodes: int, slots: int) -> None:
    arguments = ["--generate", "4", "--hours", "0.1", "--rescale-cost", "1", "--json"]
    result = CliRunner().invoke(simulate, [*arguments, "--nodes", str(nodes), "--slots", str(slots)])
    assert result.exit_code == 0, result.output


def made(tmp_path: Path) -> Path:
    write_applications(tmp_path)
    return tmp_path / "small"


@pytest.mark.parametrize(
    ("file", "column", "value", "message"),
    [
        ("placements.csv", "step_time", "0", ":2: step_time is 0, need more than 0"),
        ("placements.csv", "step_time", "inf", ":2: step_time is inf, need a finite number"),
        ("placements.csv", "sync_time", "nan", ":2: sync_time is nan, need a finite number"),
        ("placements.csv", "sync_time", "-1", ":2: sync_time is -1, need at least 0"),
        ("placements.csv", "local_bsz", "0", ":2: local_bsz is 0, need at least 1"),
        ("placements.csv", "placement", "0", ":2: placement is 0, need digits above 0"),
        ("placements.csv", "placement", "1e300", ":2: placement is 1e300, need digits above 0"),
        ("placements.csv", "step_time", "fast", ":2: step_time is 'fast', need a number"),
        ("scalability.csv", "num_nodes", "0", ":2: num_nodes is 0, need at least 1"),
        ("scalability.csv", "num_replicas", "inf", ":2: num_replicas is inf, need a finite number"),
        ("validation-128.csv", "progress", "inf", ":2: progress is inf, need a finite number"),
        ("validation-128.csv", "progress", "0", "progress must grow from row to row"),
        ("validation-128.csv", "grad_var", "-1", ":2: grad_var is -1, need at least 0"),
    ],
)
def test_traces_that_can_not_be_name_file_and_line(
    tmp_path: Path, file: str, column: str, value: str, message: str
) -> None:
    path = made(tmp_path) / file
    header, first, *rest = path.read_text().splitlines()
    cells = first.split(",")
    cells[header.split(",").index(column)] = value
    path.write_text("\n".join([header, ",".join(cells), *rest]))
    with pytest.raises(WorkloadError) as caught:
        read_application(path.parent)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_step_that_is_shorter_than_its_synchronisation(tmp_path: Path) -> None:
    path = made(tmp_path) / "placements.csv"
    path.write_text("placement,local_bsz,step_time,sync_time\n1,32,0.1,0.2\n")
    with pytest.raises(WorkloadError, match=r":2: sync_time 0.2 is more than step_time 0.1"):
        read_application(path.parent)


@pytest.mark.parametrize("name", ["validation-x.csv", "validation-0.csv", "validation-1.5.csv"])
def test_a_validation_file_without_a_batch_size(tmp_path: Path, name: str) -> None:
    folder = made(tmp_path)
    (folder / name).write_text("progress,grad_sqr,grad_var\n1,1,1\n")
    with pytest.raises(WorkloadError, match=rf"{name}: the name must say the batch size, as validation-128"):
        read_application(folder)


def test_traces_of_a_single_point_are_interpolated_by_the_nearest(tmp_path: Path) -> None:
    folder = made(tmp_path)
    (folder / "placements.csv").write_text("placement,local_bsz,step_time,sync_time\n1,32,0.1,0\n")
    (folder / "scalability.csv").write_text(
        "num_nodes,num_replicas,local_bsz,step_time,sync_time\n2,2,32,0.2,0.1\n"
    )
    app = read_application(folder)
    assert app.throughput((1,), 32) == (0.1, 0.0)
    assert app.throughput((1, 1), 64) == (0.2, 0.1)


@pytest.mark.parametrize("policy", ["tiresias", "fifo"])
def test_a_job_that_is_larger_than_the_cluster(tmp_path: Path, policy: str) -> None:
    made(tmp_path / "apps")
    workload = tmp_path / "w.csv"
    workload.write_text("name,time,application,num_replicas,batch_size\na,0,small,9,1152\n")
    line = refused(
        *("--workload", str(workload), "--apps", str(tmp_path / "apps"), "--policy", policy),
        *("--nodes", "2", "--slots", "4"),
    )
    assert "job a asks for 9 replicas, 2 nodes of 4 slots have 8" in line


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,1e300,small,1,128", "time is 1e300, need at most"),
        ("a,0,small,1e300,128", "num_replicas is 1e300, need at most"),
        ("a,0,small,1,1e300", "batch_size is 1e300, need at most"),
        ("a,0,small,1.5,128", "num_replicas is 1.5, need a whole number"),
    ],
)
def test_a_workload_that_nobody_lives_to_see(tmp_path: Path, row: str, message: str) -> None:
    made(tmp_path / "apps")
    workload = tmp_path / "w.csv"
    workload.write_text(f"name,time,application,num_replicas,batch_size\n{row}\n")
    assert message in refused("--workload", str(workload), "--apps", str(tmp_path / "apps"))


ENDLESS = "1" * 200_000  # more than Python's reader of CSV takes for one field


@pytest.mark.parametrize("content", [ENDLESS.encode(), b"\xff\xfe\x00"])
def test_files_that_are_no_csv_at_all(tmp_path: Path, content: bytes) -> None:
    folder = made(tmp_path)
    (folder / "placements.csv").write_bytes(content)
    with pytest.raises(WorkloadError, match=r"placements\.csv"):
        read_application(folder)
    for read_file in (read_workload, read_market):
        path = tmp_path / "file.csv"
        path.write_bytes(content)
        with pytest.raises(WorkloadError, match=str(path)):
            read_file(path)


def test_files_that_a_spreadsheet_has_written(tmp_path: Path) -> None:
    """They begin with a byte order mark."""
    mark = b"\xef\xbb\xbf"
    placements = made(tmp_path) / "placements.csv"
    before = read_application(placements.parent).points
    placements.write_bytes(mark + placements.read_bytes())
    assert (read_application(placements.parent).points == before).all()
    path = tmp_path / "w.csv"
    path.write_bytes(mark + b"name,time,application,num_replicas,batch_size\na,0,small,2,128\n")
    assert [(job.name, job.num_replicas) for job in read_workload(path)] == [("a", 2)]
    path.write_bytes(mark + b"seconds,price,interruptions_per_hour\n0,1,0.25\n")
    assert list(read_market(path).prices) == [1.0]


def test_options_that_would_be_lost_are_refused() -> None:
    assert "--fairness is for --objective speedup" in refused("--fairness", "-1")
    assert "--hours is for --generate" in refused("--workload", "x", "--apps", "y", "--hours", "1")
