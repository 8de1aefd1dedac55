"""Say which commands this package has, as `python -m adaptdl_elastic`.

The commands belong to `agent` and `autoscaler`, which this module does not import, as the training library.
"""

from adaptdl_elastic import __version__

if __name__ == "__main__":
    print(
        f"adaptdl-elastic {__version__} has two commands, each with --help:\n"
        "  adaptdl-run   run a training script          (also: python -m adaptdl_elastic.agent)\n"
        "  adaptdl       see and control jobs and nodes (also: python -m adaptdl_elastic.autoscaler)"
    )
