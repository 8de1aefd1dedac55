"""The parts that concern one machine: the store of a standalone job, addresses and ports, directories.

| question | module |
|---|---|
| How does the agent of a standalone job serve the store in its memory? | `store_server` |
| How does `adaptdl` find the store of a standalone job? | `runtime_file` |
| At which address do other machines reach this one? | `addresses` |
| What serves torch's TCPStore on that address? | `tcp_store` |
| What happens to lines that cannot be shown? | `safe_stream` |
| How does a process hold a file that locks something? | `file_lock` |
| What removes the directories of a process that was killed? | `scratch_directory` |
"""
