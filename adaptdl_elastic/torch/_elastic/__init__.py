"""Another number of replicas within the process.

| module | question that it answers |
|---|---|
| `eligibility` | May this script change in place? Which objects of its own forbid it? |
| `rescale` | How do those that stay change over? |
| `join` | How does a newcomer get to where the others are? |
| `recovery` | How do survivors go on after a death? |
| `regroup` | What do a planned change and a recovery have in common? |
| `state_transfer` | How do states get from one memory into another? |
| `dry_batch` | How does a loop's body run once without any effect? |
| `step_snapshot` | What did a step that did not commit change, and how is it put back? |
| `user_state` | What becomes of the script's own States in such a step? |
"""
