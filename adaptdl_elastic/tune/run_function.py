"""Run a trial's function in a replica: `run_function.py FILE`; FILE holds the function and its config."""

from __future__ import annotations

import inspect
import pickle
import sys
from pathlib import Path


def main(path: str) -> None:
    """Call the function that the trial's own process has written to this file."""
    import adaptdl_elastic.torch as adl

    function, config, backend = pickle.loads(Path(path).read_bytes())
    adl.init_process_group(backend)
    if "checkpoint_dir" in inspect.signature(function).parameters:  # as AdaptDL's functions have it
        function(config, checkpoint_dir=None)
    else:
        function(config)


if __name__ == "__main__":
    main(sys.argv[1])
