"""Change the number of replicas without restarting the processes that stay.

| module | question that it answers |
|---|---|
| `eligibility` | May this script's replicas change in place? Which of its objects forbid it? |
| `rescale` | How do the replicas that stay carry out a planned change? |
| `join` | How does a newcomer reach the position of the running replicas? |
| `recovery` | How do the survivors continue after a replica has died? |
| `survivors` | What do the survivors tell each other, and who has the newest step and sums? |
| `regroup` | Which steps do a planned change and a recovery share? |
| `state_transfer` | How are states sent from one replica's memory to another's? |
| `dry_batch` | How does a loop's body run once without any effect? |
| `step_snapshot` | How is everything restored that a failed step has changed? |
| `script_objects` | Which objects of the script are saved without being registered? |
| `plain_attributes` | What is the state of a scheduler without a `state_dict`? |
| `state_marks` | How is it recognised that a State has changed, without a copy of it? |
"""
