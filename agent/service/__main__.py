"""`python -m adaptdl_elastic.agent.service start|stop|run|keep DIRECTORY`: called by `adaptdl cluster`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from adaptdl_elastic.agent.service import lifecycle
from adaptdl_elastic.agent.service.lifecycle import LifecycleError
from adaptdl_elastic.rendezvous.local.safe_stream import protect
from adaptdl_elastic.rendezvous.services.service_config import ServiceConfigError, ServiceDirectory
from adaptdl_elastic.rendezvous.store.store_options import StoreOptionError

_ACTIONS = ("start", "stop", "run", "keep")


def main(arguments: list[str]) -> int:
    """Carry out one action on the service of a directory; errors are one line."""
    if len(arguments) != 2 or arguments[0] not in _ACTIONS:
        print(f"adaptdl service: give one of {', '.join(_ACTIONS)} and a directory", file=sys.stderr)
        return 2
    action, directory = arguments[0], ServiceDirectory(Path(arguments[1]))
    if action in ("run", "keep"):
        protect()
    try:
        if action == "run":
            return lifecycle.run(directory)
        if action == "keep":
            return lifecycle.keep(directory)
        if action == "start":
            print(json.dumps(lifecycle.start(directory)))
        else:
            lifecycle.stop(directory)
    except (LifecycleError, ServiceConfigError, StoreOptionError, OSError) as error:
        print(f"adaptdl service: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
