"""The user's side of `adaptdl-run`: options, output, event log, summary, picture.

| question | module |
|---|---|
| Which options are there, and how are they shown? | `run_parser`, `torchrun_options` (a table) |
| What do the given options mean, and are they valid? | `run_options` |
| Where does the output of replicas go, and which lines of it are not shown? | `replica_output` |
| Which traceback is shown when replicas fail? | `traceback_display` |
| What is on the terminal while the job runs, and at its end? | `display` |
| Which events are written to the event log? | `event_recorder`, `event_log` |
"""
