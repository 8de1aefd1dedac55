"""The event log is never in the way of training, and does not end without a word."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from adaptdl_elastic.agent.terminal import event_log
from adaptdl_elastic.agent.terminal.event_log import EventLog
from adaptdl_elastic.rendezvous.run_record import Event


def test_a_file_gets_a_line_for_each(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "new" / "events", pytest.fail)
    for number in range(3):
        log.write({"event": "step", "number": number})
    log.close()
    lines = (tmp_path / "new" / "events").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1, 2]


def test_a_full_disk_is_said_once() -> None:
    said: list[str] = []
    heard: list[Event] = []
    log = EventLog(Path("/dev/full"), said.append)
    log.listeners.append(heard.append)
    for _ in range(3):
        log.write({"event": "step"})
    log.close()
    assert said == ["--event-log /dev/full: the disk is full: events are written when there is room again"]
    assert len(heard) == 3


def test_events_are_written_when_a_full_disk_has_room_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "events")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", Mock(side_effect=OSError(errno.ENOSPC, "full")))
        log.write({"event": "step", "number": 0})
    log.write({"event": "step", "number": 1})
    log.close()
    lines = (tmp_path / "events").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1]


def test_a_stalled_reader_delays_no_writer_and_misses_nothing_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "LAST_WAIT", 0.0)
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    said: list[str] = []
    log = EventLog(tmp_path / "fifo", said.append)
    for number in range(4000):  # 800 kB; a pipe holds 64
        log.write({"event": "step", "number": number, "text": "x" * 160})
    assert said == []
    text = b""
    while True:
        try:
            text += os.read(reader, 1 << 16)
        except BlockingIOError:
            before = len(log.waiting)
            log.carry()
            if not before:
                break
    assert [json.loads(line)["number"] for line in text.splitlines()] == list(range(4000))
    for number in range(8000):
        log.write({"event": "step", "number": number, "text": "x" * 160})
    assert said == [f"--event-log {tmp_path / 'fifo'}: its reader does not keep up: events are lost"]
    log.close()
    os.close(reader)
    assert len(said) == 1


def test_a_reader_that_goes_is_said(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    said: list[str] = []
    log = EventLog(tmp_path / "fifo", said.append)
    os.close(reader)
    log.write({"event": "step"})
    log.close()
    assert said == [f"--event-log {tmp_path / 'fifo'}: no event is written any more: Broken pipe"]
