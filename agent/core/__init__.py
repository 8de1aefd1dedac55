"""Decide what an agent does: pure functions, no I/O, the clock passed in.

| question | module |
|---|---|
| Which state, events and actions does an agent know? | `states` |
| What does an agent do about an event? | `decisions` |
| How does a change of size in place go, as one node's agent sees it? | `inplace_change` |
| How is a death handled that other replicas survive? | `peer_loss` |
| Which replica hangs? | `hang_detection` |
| When is a person told why the job waits? | `pending_notice` |
"""
