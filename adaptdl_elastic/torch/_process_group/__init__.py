"""Torch's default process group of one generation.

| module | question that it answers |
|---|---|
| `setup` | How is it made, relaxed, broken and left? |
| `backends` | What differs between gloo and NCCL when a group breaks, ends, and has done its work? |
| `store` | Where does a generation meet, and how does waiting there end when a peer dies? |
| `selftest` | Does NCCL survive here what a change in place does to it? |
| `capability` | Have all nodes passed the self-test? |
| `placeholder` | What is the group of a newcomer that has not joined yet? |
"""
