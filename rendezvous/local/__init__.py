"""What belongs to one machine: a standalone job's store and the note where it is, addresses, directories.

| question | module |
|---|---|
| How does a standalone job's agent serve the store in its memory? | `store_server` |
| How does `adaptdl` find the store of a standalone job? | `runtime_file` |
| By which address do others reach this machine? | `addresses` |
| Who removes the directories of a process that was killed? | `scratch_directory` |
"""
