"""The node service: one process per node and cluster that does what a person at a terminal of the node did.

| question | module |
|---|---|
| How is it started, kept and stopped? | `lifecycle`, `__main__` |
| What does it do all the time? | `supervisor` |
| Which agents does it start and stop? | `decisions` (pure) |
| How does an agent get its files, and outlive the service? | `agents`, `blobs`, `archives` |
| How do the jobs of a node share one import of torch? | `server_forker` |
| Who registers the node for a job that has no agent here? | `stand_in` |
| How does it follow all jobs of the store? | `job_records` |
| How does the job of an EC2 stack run? | `stack_job` |
| How does a node get checkpoints, and the end of the output, of another one? | `checkpoint_copies` |
| What does it remember of jobs, whatever the store says later? | `known_jobs` |
| Which versions of this program are on the node? | `environments` |
| Where are the packages of a job installed? | `job_packages` |
| Who may ask it for what? | `http_server` (its list of routes), `access`, `connections` |
| Which files of a job does it hand out? | `job_files` |

An agent that it starts is `adaptdl-run` as a person would start it: the service decides nothing about a
generation. Killing the service ends neither an agent nor etcd; the next service finds them.
"""
