"""The parser of `adaptdl-run`: torchrun's options, additional ones, and how they are shown and shortened.

An option is declared by its spellings, its kind and its default, as in `-t --tee TEXT=0`. `_TYPES` has the
types of kinds, `{a,b}` is a choice, and an option without a kind is a flag.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from adaptdl_elastic import __version__
from adaptdl_elastic.agent.terminal.torchrun_options import HONOURED, WITHOUT_MEANING
from adaptdl_elastic.protocol.environment import STORE_OPTIONS, option_of

PROGRAM = "adaptdl-run"
_TYPES = {"S": float, "W": float, "N": int, "FILE": Path}
_OURS = {
    **{f"{option_of(name)} {kind}": f"{text} ({name})" for name, (kind, text) in STORE_OPTIONS.items()},
    "--etcd-api {auto,v2,v3}=auto": "version of etcd's API (default: the one that etcd answers)",
    "--etcd-timeout S": "seconds that one operation of etcd may take (default: ADAPTDL_ETCD_TIMEOUT, else 5)",
    "--replicas MIN:MAX": "replicas of the whole job (default: MIN of --nnodes, and as many as the nodes "
    "have room for)",
    "--node-name NAME": "this node's name (default: the host's, made unique)",
    "--node-type NAME": "type of this node: nodes of one type count as equally fast, and a job keeps to one "
    "type where it can (ADAPTDL_NODE_TYPE; default: the GPU's model; nodes without a GPU count as alike)",
    "--port-range LOW:HIGH": "ports to listen on (default: any free one)",
    "--checkpoint-path DIR": "directory or s3://bucket/prefix that all nodes see (default: "
    "ADAPTDL_CHECKPOINT_PATH, else ./.adaptdl/<job>)",
    "--checkpoint-timeout S=120": "seconds that a stop waits for its checkpoint (default 120)",
    "--checkpoint-interval S=30": "seconds between periodic checkpoints (default 30; 0: none)",
    "--rescale {auto,inplace,restart}=auto": "how the number of replicas changes: in place where that is "
    "possible (auto, the default), only in place, or only by a restart from a checkpoint",
    "--rescale-timeout S=60": "seconds that new replicas may take to be ready (default 60)",
    "--gpus-per-replica N=1": "neighbouring GPUs that each replica has, on nodes with GPUs (default 1)",
    "--hang-timeout S": "seconds without an answer after which a replica is killed (default 60; 0: never); "
    "if this is given, also seconds without a step",
    "--once": "if the job has ended already, exit with its exit code, also if it was stopped or has failed "
    "(default: such a job continues from its checkpoint)",
    "--anew": "start another run of a job that has ended, from the beginning; its checkpoints are moved to "
    "an archive folder",
    "--extend": "go on from the last checkpoint of a job that is done, with another script or "
    "other arguments",
    "--no-autoscale": "only `adaptdl scale` changes the number of replicas",
    "--weight W=1": "weight of the job's goodput, relative to other jobs (default 1)",
    "--no-preempt": "keep the number of replicas with which the job begins, MIN",
    "--avoid-preemptible-nodes": "use spot instances last",
    "--event-log FILE": "append each event to this file as a JSON object",
}


class OptionError(ValueError):
    """An option is invalid; the message says what was given and what to write instead."""


class RunParser(argparse.ArgumentParser):
    """A parser that raises OptionError, and resolves an abbreviated option as torchrun does.

    Attributes:
        options: all spellings of options, with what argparse knows of the option.
        torchruns: the destinations of torchrun's options.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(**how, add_help=False, allow_abbrev=False)
        self.options: dict[str, argparse.Action] = {}
        self.torchruns = {"help"}

    def declare(self, group: Any, declaration: str, help: str, torchruns: bool = False, **how: Any) -> None:
        """Add an option as its declaration says; torchrun's have a second spelling and a `PET_` variable."""
        names = re.findall(r"(?<!\S)-\S+", declaration)
        kind, given, default = declaration.split()[-1].partition("=")
        if kind in names:
            how = {"action": "store_true", **how}
        else:
            how["default"] = default if given else None
            how["choices"] = kind[1:-1].split(",") if kind.startswith("{") else None
            how["type"], how["metavar"] = _TYPES.get(kind), None if torchruns or how["choices"] else kind
        if torchruns:
            names = list(dict.fromkeys((*names, f"--{names[-1][2:].replace('-', '_')}")))
        action: argparse.Action = group.add_argument(*names, help=help, **how)
        self.options |= dict.fromkeys(action.option_strings, action)
        if torchruns:
            self.torchruns.add(action.dest)
            text = os.environ.get(f"PET_{action.dest.upper()}", action.default)
            if action.nargs == 0 and text not in (None, False, "", "0", "1"):
                raise OptionError(f"PET_{action.dest.upper()}={text} must be 0 or 1")
            action.default = bool(int(text or 0)) if action.nargs == 0 else text

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as one line that suggests the likely option, without the usage text."""
        known = [name for name in self.options if name.startswith("--")]
        for word in re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else ():
            close = difflib.get_close_matches(word, known, 1)
            message += f" (did you mean {close[0]}?)" if close else ""
        if message.endswith("training_script_args"):
            message = "there is no script to run: adaptdl-run [options] SCRIPT [arguments]"
        raise OptionError(f"{message}; see {PROGRAM} --help")

    def parse(self, typed: Sequence[str]) -> tuple[argparse.Namespace, set[str]]:
        """Return the values of a command line, and the destinations of the options that were given."""
        words, at = list(typed), 0
        while at < len(words) and words[at].startswith("-") and words[at] != "--":
            name, sign, value = words[at].partition("=")
            name = self.in_full(name, words[at])
            words[at] = f"{name}{sign}{value}"
            at += 2 if not sign and self._takes_next(name) else 1
        args, absent = self.parse_args(words), object()
        marked = self.parse_args(words, argparse.Namespace(**dict.fromkeys(vars(args), absent)))
        return args, {name for name, value in vars(marked).items() if value is not absent}

    def _takes_next(self, name: str) -> bool:
        """Return whether the next word is this option's value; short options may be joined, as in `-mt`."""
        joined = name not in self.options and not name.startswith("--")
        names = [f"-{letter}" for letter in name[1:]] if joined else [name]
        takes = [one in self.options and self.options[one].nargs != 0 for one in names]
        return True in takes and takes.index(True) == len(takes) - 1

    def in_full(self, name: str, word: str) -> str:
        """Return the option that an abbreviation means to torchrun, whatever options are added here.

        Both spellings of one option (`--nproc-per-node`, `--nproc_per_node`) are not ambiguous.
        """
        if name in self.options or not name.startswith("--"):
            return name
        near: dict[str, str] = {}
        for option, action in self.options.items():
            if option.startswith(name):
                near.setdefault(action.dest, option)
        found = [near[dest] for dest in near if dest in self.torchruns] or list(near.values())
        if len(found) > 1:
            self.error(f"ambiguous option: {word} could match {', '.join(found)}")
        return found[0] if found else name


def parser() -> RunParser:
    """Return the parser; its help has our options, then torchrun's that have an effect, then its others."""
    made = RunParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [options] SCRIPT [arguments of the script]",
        description="Run a PyTorch job whose replicas, batch size and learning rate adapt while it runs. "
        "Takes what torchrun takes, and options of its own.",
    )
    text = "the script that every replica runs, followed by the arguments of the script"
    made.add_argument("training_script", help=text)
    made.add_argument("training_script_args", nargs=argparse.REMAINDER)
    ours, theirs = made.add_argument_group("options"), made.add_argument_group("options of torchrun")
    version = f"adaptdl-elastic {__version__}"
    made.declare(ours, "--version", "show the version", action="version", version=version)
    for declaration, text in _OURS.items():
        made.declare(ours, declaration, text)
    text = "print a summary at the end (default: on a terminal)"
    made.declare(ours, "--summary", text, action=argparse.BooleanOptionalAction)
    made.declare(theirs, "-h --help", "show this help message and exit", action="help")
    without = made.add_argument_group("options of torchrun that have no effect here")
    for group, table in (theirs, HONOURED), (without, WITHOUT_MEANING):
        for declaration, text in table.items():
            made.declare(group, declaration, text, torchruns=True)
    return made
