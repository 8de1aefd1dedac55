"""`python -m adaptdl_elastic.autoscaler` is the command `adaptdl`."""

from adaptdl_elastic.autoscaler.cli import main

if __name__ == "__main__":
    main()
