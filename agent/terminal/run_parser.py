"""The parser of `adaptdl-run`: torchrun's options, additional ones, and how they are shown and shortened."""

from __future__ import annotations

import argparse
import difflib
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

from adaptdl_elastic import __version__
from adaptdl_elastic._torch_versions import complete
from adaptdl_elastic.agent.terminal.torchrun_options import torchrun_parser

PROGRAM = "adaptdl-run"
# torchrun's options that have no effect here, and why
WITHOUT_MEANING = {
    "rdzv_backend": "plans come from the coordinator, through etcd",
    "rdzv_conf": "torch's rendezvous is not used; --etcd-timeout and --rescale-timeout are what it would set",
    "node_rank": "the coordinator gives out ranks",
    "monitor_interval": "the agent waits for events and does not poll",
    "start_method": "replicas are forked from a warm server, or executed with --no-python",
    "logs_specs": "logs are written as --log-dir, --redirects and --tee say",
    "shutdown_timeout": "--checkpoint-timeout says how long a stop may take",
    "event_log_handler": "--event-log and `adaptdl events` have what happened",
    "numa_binding": "replicas are not bound to CPUs",
    "duplicate_stdout_filters": "lines are not filtered by words; see --tee and --local-ranks-filter",
    "duplicate_stderr_filters": "lines are not filtered by words; see --tee and --local-ranks-filter",
}
WITHDRAWN = {"print_completion"}
"""torchrun's options that are refused: the completions would be those of `torchrun`."""
# help texts of torchrun's options whose own text would be wrong here
_HELP = {
    "nnodes": "nodes of the job: N or MIN:MAX (default 1)",
    "nproc_per_node": "replicas on this node: N, or MIN:MAX between which their number is chosen; auto, gpu "
    "and cpu stand for as many as there are (default 1)",
    "rdzv_endpoint": "etcd of the cluster, HOST:PORT[,HOST:PORT...] (default: ADAPTDL_ETCD)",
    "rdzv_id": "name of the job (default: that of the script)",
    "standalone": "one node, without an etcd (the default where no other node and no etcd is named)",
    "max_restarts": "restart the job from its checkpoint after a failure, at most N times (default 3; fewer "
    "if the same error comes twice after the same step); lost nodes, and deaths that other replicas survive, "
    "do not count",
    "role": "set as ROLE_NAME for every replica",
    "run_path": "run the script with runpy.run_path, which is always done; overrides --no-python",
    "log_dir": "directory for the logs of replicas",
    "signals_to_handle": "signals, separated by commas, at which the job saves a checkpoint and stops, the "
    "second time at once (default SIGTERM,SIGINT,SIGHUP,SIGQUIT); Slurm's --signal=USR1@120 needs SIGUSR1",
    "master_addr": "address at which replicas meet, for scripts that name it (init_method=tcp://ADDR:PORT); "
    "only its own node can keep a store there (default: the address of the node of rank 0)",
    "master_port": "port at which replicas meet, for scripts that name it (default: any free one, or within "
    "--port-range; 29500 where several nodes are given a --master-addr)",
    "local_addr": "address at which other nodes reach this one (default: that of the route to etcd)",
    "training_script": "the script that every replica runs, followed by the arguments of the script",
}


class OptionError(ValueError):
    """An option is invalid; the message says what was given and what to write instead."""


def parser() -> argparse.ArgumentParser:
    """Return torchrun's parser with the additional options."""
    made = torchrun_parser()
    complete(made)
    made.prog = PROGRAM
    made.usage = f"{PROGRAM} [options] SCRIPT [arguments of the script]"
    made.error = partial(_refuse, made)  # type: ignore[method-assign,assignment]
    _prefer_torchruns(made)
    made.description = (
        "Run a PyTorch job whose replicas, batch size and learning rate adapt while it runs. "
        "Takes what torchrun takes, and options of its own."
    )
    made.set_defaults(max_restarts=os.environ.get("PET_MAX_RESTARTS", "3"))  # argparse converts it
    _arrange(made)
    return made


def _prefer_torchruns(made: argparse.ArgumentParser) -> None:
    """Resolve an abbreviated option as torchrun does, whatever options are added here.

    Both spellings of one option (`--nproc-per-node`, `--nproc_per_node`) are not ambiguous.
    """
    theirs = list(made._actions)
    matches = made._get_option_tuples

    def chosen(word: str) -> list[Any]:
        found: dict[int, Any] = {}
        for match in matches(word):
            found.setdefault(id(match[0]), match)
        return [match for match in found.values() if match[0] in theirs] or list(found.values())

    made._get_option_tuples = chosen  # type: ignore[method-assign,assignment]


def _arrange(made: argparse.ArgumentParser) -> None:
    """Arrange the help: additional options, then torchrun's that have an effect, then its others."""
    theirs = made._optionals
    theirs.title = "options of torchrun"
    ours = made.add_argument_group("options")
    _add_ours(ours)
    without = made.add_argument_group("options of torchrun that have no effect here")
    for action in made._actions:
        action.help = _HELP.get(action.dest, action.help)
        if action.dest in WITHOUT_MEANING:
            action.help = WITHOUT_MEANING[action.dest]
            theirs._group_actions.remove(action)
            without._group_actions.append(action)
    for action in [action for action in made._actions if action.dest in WITHDRAWN]:
        theirs._remove_action(action)
        for option in action.option_strings:
            del made._option_string_actions[option]
    made._action_groups.remove(ours)
    made._action_groups.insert(made._action_groups.index(theirs), ours)


def _refuse(made: argparse.ArgumentParser, message: str) -> None:
    """Raise argparse's message as one line that suggests the likely option, without the usage text."""
    known = [name for action in made._actions for name in action.option_strings if name.startswith("--")]
    for word in re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else ():
        close = difflib.get_close_matches(word, known, 1)
        message += f" (did you mean {close[0]}?)" if close else ""
    if message.endswith("training_script_args"):
        message = "there is no script to run: adaptdl-run [options] SCRIPT [arguments]"
    raise OptionError(f"{message}; see {PROGRAM} --help")


def _add_ours(group: Any) -> None:
    add = group.add_argument
    seconds = partial(add, type=float, metavar="S")
    add("--version", action="version", version=f"adaptdl-elastic {__version__}", help="show the version")
    add("--etcd", metavar="HOST:PORT", help="etcd of the cluster; the same as --rdzv-endpoint (ADAPTDL_ETCD)")
    add(
        "--etcd-api",
        choices=["auto", "v2", "v3"],
        default="auto",
        help="version of etcd's API (default: the one that etcd answers)",
    )
    add("--etcd-ca", metavar="PEM", help="CA of etcd's certificate (ADAPTDL_ETCD_CA)")
    add("--etcd-cert", metavar="PEM", help="client certificate (ADAPTDL_ETCD_CERT)")
    add("--etcd-key", metavar="PEM", help="key of the client certificate (ADAPTDL_ETCD_KEY)")
    add(
        "--etcd-user",
        metavar="NAME",
        help="user of etcd (ADAPTDL_ETCD_USER); ADAPTDL_ETCD_PASSWORD_FILE names the file with the password",
    )
    seconds(
        "--etcd-timeout",
        help="seconds that one operation of etcd may take (default: ADAPTDL_ETCD_TIMEOUT, else 5)",
    )
    add(
        "--cluster",
        metavar="NAME",
        help="name of the cluster, where several share an etcd (ADAPTDL_CLUSTER; default: default)",
    )
    add(
        "--replicas",
        metavar="MIN:MAX",
        help="replicas of the whole job (default: MIN of --nnodes, and as many as the nodes have room for)",
    )
    add("--node-name", metavar="NAME", help="this node's name (default: the host's, made unique)")
    add(
        "--node-type",
        metavar="NAME",
        help="type of this node: nodes of one type count as equally fast, and a job keeps to one type where "
        "it can (ADAPTDL_NODE_TYPE; default: the GPU's model; nodes without a GPU count as alike)",
    )
    add("--port-range", metavar="LOW:HIGH", help="ports to listen on (default: any free one)")
    add(
        "--checkpoint-path",
        metavar="DIR",
        help="directory or s3://bucket/prefix that all nodes see "
        "(default: ADAPTDL_CHECKPOINT_PATH, else ./.adaptdl/<job>)",
    )
    seconds(
        "--checkpoint-timeout",
        default=120.0,
        help="seconds that a stop waits for its checkpoint (default 120)",
    )
    seconds(
        "--checkpoint-interval",
        default=30.0,
        help="seconds between periodic checkpoints (default 30; 0: none)",
    )
    add(
        "--rescale",
        choices=["auto", "inplace", "restart"],
        default="auto",
        help="how the number of replicas changes: in place where that is possible (auto, the default), only "
        "in place, or only by a restart from a checkpoint",
    )
    seconds(
        "--rescale-timeout", default=60.0, help="seconds that new replicas may take to be ready (default 60)"
    )
    add(
        "--gpus-per-replica",
        type=int,
        default=1,
        metavar="N",
        help="neighbouring GPUs that each replica has, on nodes with GPUs (default 1)",
    )
    seconds(
        "--hang-timeout",
        help="seconds without an answer after which a replica is killed (default 60; 0: never); if this is "
        "given, also seconds without a step",
    )
    add(
        "--once",
        action="store_true",
        help="if the job has ended already, exit with its exit code, also if it was stopped or has failed "
        "(default: such a job continues from its checkpoint)",
    )
    add(
        "--anew",
        action="store_true",
        help="start another run of a job that has ended, from the beginning; its checkpoints are moved to an "
        "archive folder",
    )
    add("--no-autoscale", action="store_true", help="only `adaptdl scale` changes the number of replicas")
    add(
        "--weight",
        type=float,
        default=1.0,
        metavar="W",
        help="weight of the job's goodput, relative to other jobs (default 1)",
    )
    add(
        "--no-preempt", action="store_true", help="keep the number of replicas with which the job begins, MIN"
    )
    add("--avoid-preemptible-nodes", action="store_true", help="use spot instances last")
    add("--event-log", type=Path, metavar="FILE", help="append each event to this file as a JSON object")
    add(
        "--summary",
        action=argparse.BooleanOptionalAction,
        help="print a summary at the end (default: on a terminal)",
    )
