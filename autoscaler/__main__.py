"""Run the command `adaptdl` as `python -m adaptdl_elastic.autoscaler`."""

from adaptdl_elastic.autoscaler.cli import main

if __name__ == "__main__":
    main()
