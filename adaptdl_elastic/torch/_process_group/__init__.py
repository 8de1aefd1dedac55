"""Make, abort and leave torch's default process group of one generation.

| module | question that it answers |
|---|---|
| `setup` | How is it made, given its time-outs, aborted and left? |
| `backends` | How do gloo and NCCL differ when a group is aborted, ends, and completes its work? |
| `interfaces` | On which network interface does gloo listen? |
| `store` | Where does a generation meet, and how does waiting there end when a peer dies? |
| `signed_store` | How are values of strangers in that store recognised? |
| `selftest` | Does NCCL on this machine survive what a change in place does to it? |
| `capability` | Have all nodes passed the self-test? |
| `placeholder` | What is the group of a newcomer that has not joined yet? |
| `script_collectives` | How does a newcomer get the results of collectives that the others have passed? |
"""
