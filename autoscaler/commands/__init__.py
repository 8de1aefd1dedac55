"""The subcommands of `adaptdl`; `adaptdl_elastic.autoscaler.cli` lists them."""
