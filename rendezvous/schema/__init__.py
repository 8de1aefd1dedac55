"""The records in the store, and their keys.

| question | module |
|---|---|
| Which records are there, and which values are valid? | `records` |
| Under which key is a record kept? | `keys` |
"""
