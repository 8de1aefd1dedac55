"""Run `adaptdl-run` as `python -m adaptdl_elastic.agent`."""

import sys

from adaptdl_elastic.agent.cli import main

if __name__ == "__main__":
    sys.exit(main())
