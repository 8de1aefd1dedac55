"""What belongs to one machine: a private etcd, the note where it is, addresses, scratch directories.

| question | module |
|---|---|
| How does `--standalone` start an etcd of its own? | `private_etcd` |
| How does `adaptdl` find the store of a standalone job? | `runtime_file` |
| By which address do others reach this machine? | `addresses` |
| Who removes the directories of a process that was killed? | `scratch_directory` |
"""
