"""Choose sizes and places exactly: the integer programs and heuristics behind `policy.allocate`.

| Question | Module |
|---|---|
| Which numbers of replicas, on which types of nodes, are considered? | `sizes` |
| Which table of values is optimised? | `tables` |
| Which sizes are best, regardless of places? | `typed_knapsack`, for one type of node `knapsack` |
| Which replicas go to which nodes? | `placement` |
| Which jobs make room when another job finds no place? | `eviction` |
| How are small clusters solved as one program? | `integer_program` |
| In which order are these tried? | `solve` |
"""
