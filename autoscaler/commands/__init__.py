"""The subcommands of `adaptdl`; `adaptdl_elastic.autoscaler.cli` says which there are."""
