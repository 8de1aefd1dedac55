"""Decide what an agent does: pure functions without I/O, with the clock passed in.

| question | module |
|---|---|
| Which state, events and actions does an agent know? | `states` |
| What does an agent do about an event? | `decisions` |
| How does one node's agent carry out a change of size in place? | `inplace_change` |
| What does a node say that it holds? | `held_record` |
| How is the end of a generation on a node reported? | `generation_end` |
| How is a death handled that other replicas survive? | `peer_loss` |
| Which replica hangs? | `hang_detection` |
| When is the user told why the job waits? | `pending_notice` |
"""
