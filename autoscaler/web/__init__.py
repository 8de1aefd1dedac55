"""The page of `adaptdl web`: what a cluster does, live, and what a person asks of it.

Only the standard library serves it. The page has no build step and loads nothing from elsewhere.

| question | module |
|---|---|
| Which values does the page show of a cluster? | `overview` |
| Which values does it show of one job? | `job_document` |
| How did a job's numbers change while the page was served? | `history` |
| How does the server follow the store? | `feed` |
| Which requests are let in? | `access` |
| What can a person ask of a job? | `actions` |
| How are requests answered? | `http_server` |
| How is it started? | `command` |
"""
