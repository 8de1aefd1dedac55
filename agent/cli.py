"""The command `adaptdl-run`, also `python -m adaptdl_elastic.agent`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence

from adaptdl_elastic import _torch_versions
from adaptdl_elastic._explained import see
from adaptdl_elastic.agent.terminal.run_options import parse
from adaptdl_elastic.agent.terminal.run_parser import OptionError
from adaptdl_elastic.protocol.channel import STOPPED
from adaptdl_elastic.protocol.environment import LOG_LEVEL, drop_those_of_agents
from adaptdl_elastic.rendezvous.local.safe_stream import protect
from adaptdl_elastic.rendezvous.text import log_to_stderr


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the job's exit code (2: the command line is invalid)."""
    protect()
    if unusable := _torch_versions.why_not(_torch_versions.installed()):
        print(f"adaptdl-run: error: {unusable}", file=sys.stderr)
        return 1
    try:
        log_to_stderr(_log_level(), "adaptdl-run: %(name)s: %(message)s")
        strays = drop_those_of_agents(os.environ)
        options = parse(arguments)
    except OptionError as error:
        print(f"adaptdl-run: error: {error}", file=sys.stderr)
        return 2
    from adaptdl_elastic.agent.launch import complain, ignore_signals, launch
    from adaptdl_elastic.agent.taking_part import LaunchError
    from adaptdl_elastic.agent.terminal.replica_output import NoOutputError, StreamOptionError
    from adaptdl_elastic.rendezvous.local.addresses import NoPortError
    from adaptdl_elastic.rendezvous.local.runtime_file import RuntimeFileError
    from adaptdl_elastic.rendezvous.store.store_options import StoreOptionError

    if strays:
        complain(f"{', '.join(strays)}: of no effect here, since only an agent sets this, for its replicas")
    for note in options.notes:
        complain(note)
    # until the agent handles signals itself, there is nothing to save
    for number in options.signals:
        if signal.getsignal(number) is not signal.SIG_IGN:  # keep ignored signals ignored, as `nohup` needs
            signal.signal(number, lambda number, frame: sys.exit(130 if number == signal.SIGINT else STOPPED))
    try:
        return launch(options, complain)
    except (StreamOptionError, StoreOptionError) as error:
        complain(f"error: {error}")
        return 2
    except (LaunchError, NoOutputError, NoPortError, RuntimeFileError) as error:
        complain(f"error: {error}{see(str(error))}")
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        ignore_signals(options.signals)


def _log_level() -> int:
    text = os.environ.get(LOG_LEVEL) or "WARNING"
    number = logging.getLevelName(text.upper())
    if not isinstance(number, int):
        raise OptionError(f"{LOG_LEVEL} is {text!r}: write DEBUG, INFO, WARNING or ERROR")
    return number


if __name__ == "__main__":
    sys.exit(main())
