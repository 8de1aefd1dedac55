"""One node: `adaptdl-run`, the elastic agent, and the replica processes it supervises."""
