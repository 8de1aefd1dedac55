"""One node: `adaptdl-run`, the elastic agent, and the replica processes that it supervises."""
